"""Between the scheduler's requests and their grammars: tokens go out, masks come in.

A request waits for its grammar, and others do not: a step goes without those whose masks are not
there in time.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from lora_serve.config import EngineConfig
from lora_serve.errors import (
    GrammarUnavailableError,
    InvalidRequestError,
    LoraServeError,
    RequestFailedError,
)
from lora_serve.sampling_params import SamplingParams
from lora_serve.scheduler.progress import RequestProgress
from lora_serve.scheduler.request import Request, RequestStatus
from lora_serve.scheduler.scheduler import Scheduler
from lora_serve.step import ModelInfo
from lora_serve.structured_output.client import GrammarProcess
from lora_serve.structured_output.service import GrammarService, MaskReply
from lora_serve.structured_output.wire import GrammarSettings

PATIENCE_SECONDS = 0.003  # a step's, for masks; eight take a tenth of it (Zen 5)
POLL_SECONDS = 0.001  # between two looks, while nothing else is to be done

Ended = tuple[Request, LoraServeError | None]  # None: the answer is complete


class RequestGrammars:
    """Opens, advances and closes what `service` follows, as the scheduler's requests go on."""

    def __init__(self, service: GrammarService, scheduler: Scheduler) -> None:
        self._service = service
        self._scheduler = scheduler
        self._in_time: set[str] = set()  # running requests whose masks a step may wait for

    @property
    def is_waiting(self) -> bool:
        return self._service.num_pending > 0

    def open(self, request_id: str, params: SamplingParams) -> None:
        """Begin a request's answer, if its params ask for a grammar.

        Raises:
            OverloadedError: too many wait for theirs already.
        """
        if params.structured_outputs is not None:
            self._service.open(
                request_id, params.structured_outputs, allows_eos=not params.ignore_eos
            )

    def advance(self, progress: Iterable[RequestProgress]) -> None:
        """Tell of the tokens that a step gave."""
        new_tokens = [
            (one.request.request_id, one.new_token_ids)
            for one in progress
            if one.request.has_grammar and one.new_token_ids and one.finish_reason is None
        ]
        if new_tokens:
            self._service.advance(new_tokens)
            self._in_time |= {request_id for request_id, _ in new_tokens}

    def close(self, request_id: str) -> None:
        """The request has ended; it may have had no grammar."""
        self._service.close(request_id)
        self._in_time.discard(request_id)

    def take_in(self) -> list[Ended]:
        """Give the scheduler the masks that have come; return the requests that must end.

        Waits a little for those of running requests. One that is late is not waited for again until
        it has come.
        """
        ended: list[Ended] = []
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._service.num_pending:
            wait_seconds = deadline - time.monotonic() if self._in_time else 0.0
            replies = self._service.take(max(0.0, wait_seconds))
            if not replies:
                break
            ended += [end for reply in replies if (end := self._take(reply)) is not None]
        self._in_time.clear()
        return ended

    def shut_down(self) -> None:
        self._service.shut_down()

    def _take(self, reply: MaskReply) -> Ended | None:
        self._in_time.discard(reply.request_id)
        request = self._scheduler.get(reply.request_id)
        assert request is not None, f"{reply.request_id} has left, and its grammar was not closed"
        assert request.status is not RequestStatus.WAITING, f"{reply.request_id} had its mask"
        if reply.is_unavailable:
            return request, GrammarUnavailableError(reply.error)
        if reply.is_fault:
            return request, RequestFailedError(reply.error)
        if reply.error:
            return request, InvalidRequestError(reply.error, "structured_outputs")
        if reply.is_finished or not _leaves_any(reply.bitmask or b"", request):
            return request, None
        assert reply.bitmask is not None, "an answer that is not complete has no mask"
        self._scheduler.mask_came(request, reply.bitmask)
        return None


def _leaves_any(bitmask: bytes, request: Request) -> bool:
    """Whether the mask allows a token that min_tokens does not forbid."""
    if request.num_output_tokens >= request.params.min_tokens:
        return True
    bits = np.unpackbits(np.frombuffer(bitmask, np.uint8), bitorder="little")
    banned = np.array(request.end_token_ids, np.int64)
    bits[banned[banned < len(bits)]] = 0
    return bool(bits.any())


def make_grammar_service(config: EngineConfig, model: ModelInfo) -> GrammarProcess:
    """The service that the config names; its process starts with the first request for it."""
    settings = config.structured_outputs
    return GrammarProcess(
        GrammarSettings(
            backend=settings.library,
            tokenizer=config.model.tokenizer or config.model.model,
            revision=config.model.revision,
            model=config.model.model,
            vocab_size=model.vocab_size,
            compile_seconds=settings.structured_outputs_compile_timeout,
        )
    )
