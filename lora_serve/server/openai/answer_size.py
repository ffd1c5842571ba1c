"""How much an answer may have to tell: the product of choices, tokens and alternatives is bounded.

Each factor has its own limit; together they would make answers of hundreds of megabytes, which take
memory and time of all others. Of a stream one token of each choice is counted, which a step may
draw at once; what waits to be read is bounded by --max-stream-backlog.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lora_serve.errors import InvalidRequestError
from lora_serve.sampling_params import SamplingParams
from lora_serve.server.engine_api import Engine
from lora_serve.server.openai.inputs import Input
from lora_serve.server.openai.protocol import ChatBody, CompletionBody

MAX_ENTRIES = 2**19


@dataclass(frozen=True, slots=True)
class AnswerSize:
    """What one token of a prompt, and of an answer, adds in entries: ids, texts and alternatives.

    of_scored_token: what one of the prompt tokens adds whose logprobs are asked for.
    copies: how often each prompt is told. is_streamed: drawn tokens are told one by one.
    """

    of_prompt_token: int
    of_scored_token: int
    of_drawn_token: int
    copies: int
    is_streamed: bool

    def check(self, engine: Engine, inputs: Sequence[Input], params: SamplingParams) -> None:
        """Raise InvalidRequestError for an answer of more entries than is allowed.

        One choice may always tell all that there can be in the model's context.
        """
        context = engine.model_info.max_model_len
        limit = max(MAX_ENTRIES, context * (max(0, engine.config.model.max_logprobs) + 2))
        num_entries = 0
        for item in inputs:
            room = max(0, context - item.num_tokens)
            drawn = room if params.max_tokens is None else params.max_tokens
            num_entries += self.copies * self.of_prompt_token * item.num_tokens
            num_entries += self.copies * self.of_scored_token * _num_scored(params, item.num_tokens)
            told_at_once = min(drawn, 1) if self.is_streamed else drawn
            num_entries += params.n * self.of_drawn_token * told_at_once
        if num_entries > limit:
            field = "n" if params.n > 1 else "logprobs"
            raise InvalidRequestError(
                f"{field}: the answer may hold {num_entries} log-probabilities and tokens of "
                f"prompts ({len(inputs)} prompts, n {params.n}, logprobs "
                f"{_shown(params.logprobs)}, prompt_logprobs {_shown(params.prompt_logprobs)}), at "
                f"most {limit} are allowed; lower n, logprobs or max_tokens, or send several "
                "requests",
                field,
            )


def completion_size(body: CompletionBody, params: SamplingParams) -> AnswerSize:
    """Each choice tells the prompt."""
    of_prompt = bool(body.echo) + bool(body.return_token_ids)
    tells = (body.echo and body.logprobs is not None, body.prompt_logprobs is not None)
    of_scored = sum(map(bool, tells)) * _entries(params.prompt_logprobs)
    drawn = _entries(params.logprobs)
    return AnswerSize(of_prompt, of_scored, drawn, params.n, bool(body.stream))


def chat_size(body: ChatBody, params: SamplingParams, *, stream: bool) -> AnswerSize:
    """The prompt is told once; its ids are told with each choice of a stream."""
    of_prompt = 0
    if body.return_token_ids:
        of_prompt = params.n if stream else 1
    drawn = _entries(params.logprobs)
    return AnswerSize(of_prompt, _entries(params.prompt_logprobs), drawn, 1, stream)


def _entries(num_top: int | None) -> int:
    return 0 if num_top is None else num_top + 1


def _num_scored(params: SamplingParams, num_tokens: int) -> int:
    if params.prompt_logprobs_last_n is not None:
        return min(num_tokens, params.prompt_logprobs_last_n)
    return max(0, num_tokens - params.prompt_logprob_start)


def _shown(value: int | None) -> str:
    return "off" if value is None else str(value)
