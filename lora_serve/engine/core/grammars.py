"""Between the scheduler's requests and their grammars: tokens go out, masks come in.

A request waits for its grammar, and others do not: a step goes without those whose masks are not
there in time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from lora_serve.bitmask import allows, allows_any, common_bitmask
from lora_serve.config import EngineConfig
from lora_serve.errors import (
    GrammarUnavailableError,
    InvalidRequestError,
    LoraServeError,
    RequestFailedError,
)
from lora_serve.model_info import ModelInfo
from lora_serve.sampling_params import SamplingParams
from lora_serve.scheduler.progress import RequestProgress
from lora_serve.scheduler.request import Request, RequestStatus
from lora_serve.scheduler.scheduler import Scheduler
from lora_serve.structured_output.client import GrammarProcess
from lora_serve.structured_output.service import GrammarService, MaskReply, NewTokens
from lora_serve.structured_output.wire import GrammarSettings
from lora_serve.structured_outputs import MaskedDrafts

PATIENCE_SECONDS = 0.003  # a step's, for masks; eight take a tenth of it (Zen 5)
MOST_DRAFTS = 64  # in one reply: at a mask's limit of 0.1 s no process seems to hang
POLL_SECONDS = 0.001  # between two looks, while nothing else is to be done

Ended = tuple[Request, LoraServeError | None]  # None: the answer is complete


class RequestGrammars:
    """Opens, advances and closes what `service` follows, as the scheduler's requests go on."""

    def __init__(self, service: GrammarService, scheduler: Scheduler) -> None:
        self._service = service
        self._scheduler = scheduler
        self._open: set[str] = set()  # requests that have a grammar
        self._in_time: set[str] = set()  # running requests whose masks a step may wait for
        self._first_replies: dict[str, MaskReply] = {}  # of requests that reason, or may
        self._ended: list[Ended] = []  # nothing may follow their reasoning

    @property
    def is_waiting(self) -> bool:
        return self._service.num_pending > 0

    def open(self, request_id: str, params: SamplingParams, share: str, scope: str) -> None:
        """Begin a request's answer, if its params ask for a grammar.

        share: at whose cost the grammar is compiled. scope: whose grammar it is, as of
            `StructuredOutput`.

        Raises:
            OverloadedError: too many wait for theirs already.
        """
        if params.structured_outputs is not None:
            self._service.open(
                request_id,
                replace(params.structured_outputs, scope=scope),
                allows_eos=not params.ignore_eos,
                share=share,
            )
            self._open.add(request_id)

    def advance(self, progress: Iterable[RequestProgress]) -> None:
        """Tell of the tokens that a step gave."""
        if not self._open:
            return
        constrained = []
        for one in progress:
            request, num_new = one.request, len(one.new_token_ids)
            if not (request.has_grammar and num_new) or one.finish_reason is not None:
                continue
            if token_ids := request.constrained_token_ids(num_new):
                constrained.append((request, token_ids))
            elif request.grammar_start is not None:
                self._note_reasoned(request)
        if constrained:
            guesses = self._scheduler.guesses([request for request, _ in constrained])
            self._service.advance(
                [
                    NewTokens(request.request_id, token_ids, guess)
                    for (request, token_ids), guess in zip(constrained, guesses, strict=True)
                ]
            )
            self._in_time |= {request.request_id for request, _ in constrained}

    def close(self, request_id: str) -> None:
        """The request has ended; it may have had no grammar."""
        self._service.close(request_id)
        self._open.discard(request_id)
        self._in_time.discard(request_id)
        self._first_replies.pop(request_id, None)
        self._ended = [end for end in self._ended if end[0].request_id != request_id]

    def take_in(self) -> list[Ended]:
        """Give the scheduler the masks that have come; return the requests that must end.

        Waits a little for those of running requests. One that is late is not waited for again until
        it has come.
        """
        ended, self._ended = self._ended, []
        if self._service.num_pending:
            ended += self._take_replies()
        self._in_time.clear()
        return ended

    def _take_replies(self) -> Iterator[Ended]:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._service.num_pending:
            wait_seconds = deadline - time.monotonic() if self._in_time else 0.0
            replies = self._service.take(max(0.0, wait_seconds))
            if not replies:
                break
            for reply in replies:
                if (end := self._take(reply)) is not None:
                    yield end

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
        if request.params.reasoning is not None:
            self._first_replies.setdefault(request.request_id, reply)
        if request.grammar_start is None:  # what the reply says is due when reasoning has ended
            self._scheduler.mask_came(request, b"")
            return None
        return self._settle(request, reply)

    def _note_reasoned(self, request: Request) -> None:
        """Reasoning has ended, and the grammar begins."""
        end = self._settle(request, self._first_replies[request.request_id])
        if end is not None:
            self._ended.append(end)

    def _settle(self, request: Request, reply: MaskReply) -> Ended | None:
        """Let a request go on with what may follow, or end where nothing may."""
        if reply.is_finished:
            return request, None
        assert reply.bitmask is not None, "an answer that is not complete has no mask"
        mask = common_bitmask(reply.bitmask, request.allowed)
        if _leaves_any(request, mask):
            self._scheduler.mask_came(request, mask, _drawable(request, reply.drafts))
            return None
        return request, None if _may_end(reply.bitmask, request) else _nothing_left(request)


def _leaves_any(request: Request, mask: bytes, drafts: Sequence[int] = ()) -> bool:
    """Whether a mask allows a token that may be drawn behind a request's tokens, and drafts."""
    banned = request.banned_token_ids(request.num_tokens + len(drafts), drafts)
    is_as_it_was = request.allowed is None and not banned  # most often
    return is_as_it_was or allows_any(mask, banned)


def _drawable(request: Request, drafts: MaskedDrafts | None) -> MaskedDrafts | None:
    """The first drafts, as far as each may be drawn, and a token behind it.

    Their masks are what both the grammar and the client allow.
    """
    reasoning = request.params.reasoning
    if drafts is None or (reasoning and not reasoning.is_open and not request.num_output_tokens):
        return None  # the answer may begin with reasoning instead
    allowed, masks = request.allowed, list[bytes]()
    for count, token_id in enumerate(drafts.token_ids, 1):
        mask = common_bitmask(drafts.bitmask_behind(count), allowed)
        is_allowed = allowed is None or allows(allowed, token_id)
        if not (is_allowed and _leaves_any(request, mask, drafts.token_ids[:count])):
            break
        masks.append(mask)
    return drafts.narrowed(masks)


def _may_end(bitmask: bytes, request: Request) -> bool:
    """Whether the grammar lets the answer end here."""
    allows_eos = any(allows(bitmask, token_id) for token_id in request.eos_token_ids)
    return allows_eos or not allows_any(bitmask, request.end_token_ids)


def _nothing_left(request: Request) -> InvalidRequestError:
    name = "bad_words" if request.allowed is None else "allowed_token_ids"
    return InvalidRequestError(
        f"{name} leaves no token that the grammar of this request allows behind "
        f"{request.num_output_tokens} tokens of the answer; allow what it needs, or change it",
        name,
    )


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
            max_drafts=min(config.speculative.max_drafts, MOST_DRAFTS),
            log=config.log,
        ),
        config.limits.engine_ready_timeout or math.inf,
    )
