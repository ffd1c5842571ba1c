"""Turns engine outputs into text: detokenizes, finds stop strings, tells apart n choices."""

from __future__ import annotations

import time

from lora_serve.engine.frontend.request_states import EMBEDDING_ABORTED
from lora_serve.engine.wire import error_from_info
from lora_serve.errors import LoraServeError, RequestAbortedError
from lora_serve.messages import EngineOutput, EngineRequest
from lora_serve.outputs import AnswerTimes, OutputDelta
from lora_serve.pooling import PoolingParams, embedding
from lora_serve.step import TokenLogprobs
from lora_serve.text.detokenizer import IncrementalDetokenizer
from lora_serve.text.tokenizer import Tokenizer


class ChoiceState:
    """One of a prompt's n choices while it grows."""

    def __init__(self, message: EngineRequest, index: int, tokenizer: Tokenizer) -> None:
        request, params = message.request, message.request.params
        self.index = index
        self.is_finished = False
        self._includes_stop = params.include_stop_str_in_output
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # not told yet
        self._arrival = message.arrival_time
        self._pooling, self._num_prompt_tokens = request.pooling, request.prompt.num_tokens
        self._first_token: float | None = None
        self._num_tokens = 0  # before the last output
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
            shown_special_tokens=request.shown_special_tokens,
            min_tokens=params.min_tokens,
            prompt_token_ids=request.prompt.token_ids,
        )

    def delta(self, output: EngineOutput) -> OutputDelta | None:
        """What `output` adds to this choice. A stop string finishes it, whatever the engine says.

        The token that ended the answer is told, but not shown as text (as vLLM does it). None for
        a chunk of the prompt: its logprobs are told with the prompt's last, in one piece.

        Raises:
            RequestAbortedError, RequestFailedError: there is no embedding.
        """
        self._prompt_logprobs += output.prompt_logprobs
        if not output.new_token_ids and output.finish_reason is None:
            return None
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, ()
        shown = output.new_token_ids
        if output.finish_reason == "stop" and not self._includes_stop:
            shown = shown[:-1]
        text = self._detokenizer.append(shown, finished=output.finish_reason is not None)
        finish_reason, stop_reason = output.finish_reason, output.stop_token_id
        stop_string = self._detokenizer.stop_string
        # One step may draw tokens behind the one that completes a stop string.
        end, num_to_stop = None, self._detokenizer.num_tokens_to_stop
        if num_to_stop is not None:
            end = num_to_stop - self._num_tokens
        told = output.new_token_ids[:end]
        # The drafts come first; one behind the end of the answer is no token of it.
        num_accepted = min(output.num_accepted_drafts, len(told))
        self._num_tokens += len(output.new_token_ids)
        self.is_finished = finish_reason is not None or stop_string is not None
        if self._first_token is None:
            self._first_token = time.monotonic()
        return OutputDelta(
            index=self.index,
            text=text,
            token_ids=told,
            logprobs=output.logprobs[:end],
            finish_reason="stop" if stop_string is not None else finish_reason,
            stop_reason=stop_string if stop_string is not None else stop_reason,
            num_cached_tokens=output.num_cached_tokens,
            num_cached_by_tier=output.num_cached_by_tier,
            adapter=output.adapter,
            prompt_logprobs=prompt_logprobs,
            embedding=b"" if self._pooling is None else self._embedding(self._pooling, output),
            times=self._times(output) if self.is_finished else None,
            num_stored_tokens=output.num_stored_tokens,
            num_accepted_drafts=num_accepted,
            num_rejected_drafts=output.num_drafts - num_accepted,
        )

    def _embedding(self, pooling: PoolingParams, output: EngineOutput) -> bytes:
        if output.finish_reason == "abort":
            raise RequestAbortedError(EMBEDDING_ABORTED)
        return embedding(output.pooled, pooling, self._num_prompt_tokens)

    def _times(self, last: EngineOutput) -> AnswerTimes:
        now = time.monotonic()
        return AnswerTimes(self._arrival, last.scheduled_time, self._first_token or now, now)


class OutputProcessor:
    """All choices that are still growing, by the engine's request id."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._choices: dict[str, ChoiceState] = {}

    @property
    def num_unfinished(self) -> int:
        return len(self._choices)

    def add(self, message: EngineRequest) -> None:
        for index, choice_id in enumerate(message.choice_ids):
            self._choices[choice_id] = ChoiceState(message, index, self._tokenizer)

    def discard(self, request_id: str) -> bool:
        """Forget a choice; True if it was still growing, so that the engine must abort it."""
        return self._choices.pop(request_id, None) is not None

    def process(self, output: EngineOutput) -> tuple[OutputDelta | LoraServeError | None, bool]:
        """The delta or error, if there is one to tell, and whether to abort the choice.

        There is none for a choice that is no longer wanted.
        """
        choice = self._choices.get(output.request_id)
        if choice is None:
            return None, False
        if output.error is not None:
            del self._choices[output.request_id]
            return error_from_info(output.error), False
        try:
            delta = choice.delta(output)
        except LoraServeError as error:
            del self._choices[output.request_id]
            return error, False
        if choice.is_finished:
            del self._choices[output.request_id]
        return delta, choice.is_finished and output.finish_reason is None
