"""How much an answer may have to tell: the product of choices, tokens and alternatives is bounded.

Each factor has its own limit; together they would make answers of hundreds of megabytes, which take
memory and time of all others. What is told while tokens are drawn, in a stream, is bounded by
--max-stream-backlog instead.
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

    copies: how often each prompt is told.
    """

    of_prompt_token: int
    of_drawn_token: int
    copies: int

    def check(self, engine: Engine, inputs: Sequence[Input], params: SamplingParams) -> None:
        """Raise InvalidRequestError for an answer of more entries than is allowed.

        One choice may always tell all that there can be in the model's context.
        """
        context = engine.model_info.max_model_len
        limit = max(MAX_ENTRIES, context * (engine.config.model.max_logprobs + 2))
        num_entries = 0
        for item in inputs:
            room = max(0, context - item.num_tokens)
            drawn = room if params.max_tokens is None else params.max_tokens
            num_entries += self.copies * self.of_prompt_token * item.num_tokens
            num_entries += params.n * self.of_drawn_token * drawn
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
    if body.echo and body.logprobs is not None:
        of_prompt += body.logprobs + 1
    if body.prompt_logprobs is not None:
        of_prompt += body.prompt_logprobs + 1
    return AnswerSize(of_prompt, _drawn(params, stream=bool(body.stream)), params.n)


def chat_size(body: ChatBody, params: SamplingParams) -> AnswerSize:
    """The prompt is told once; its ids are told with each choice of a stream."""
    of_prompt = 0 if body.prompt_logprobs is None else body.prompt_logprobs + 1
    if body.return_token_ids:
        of_prompt += params.n if body.stream else 1
    return AnswerSize(of_prompt, _drawn(params, stream=bool(body.stream)), 1)


def _drawn(params: SamplingParams, *, stream: bool) -> int:
    return 0 if stream or params.logprobs is None else params.logprobs + 1


def _shown(value: int | None) -> str:
    return "off" if value is None else str(value)
