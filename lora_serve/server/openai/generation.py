"""Runs all prompts of one body at once, and closes them all with the first that fails.

Knows none of the formats of answers; `Answer` is what it needs of them.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Protocol, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lora_serve.chat.reasoning_parsers.parser import ReasoningFormat
from lora_serve.engine.frontend.admission import RequestGroup
from lora_serve.errors import AdapterNotFoundError, InvalidRequestError
from lora_serve.generate_request import GenerateRequest
from lora_serve.outputs import OutputDelta, RequestOutput, count_logprobs
from lora_serve.sampling_params import SamplingParams
from lora_serve.server.adapter_names.base import AdapterNames
from lora_serve.server.context import ServerContext
from lora_serve.server.engine_api import Engine
from lora_serve.server.field_names import field_names
from lora_serve.server.http.auth import caller_of
from lora_serve.server.http.disconnect import unless_disconnected
from lora_serve.server.http.instrumentation import route_of
from lora_serve.server.http.json_response import json_response
from lora_serve.server.http.request_ids import HEADER, MAX_CHARS, id_of
from lora_serve.server.http.request_record import RequestRecord, record_of
from lora_serve.server.http.streaming import EventStream, StreamForm
from lora_serve.server.openai.inputs import Input
from lora_serve.server.openai.kv_transfer import check_kv_transfer
from lora_serve.server.openai.models import ModelTarget, as_asked_for
from lora_serve.server.openai.parameters import constraint_field
from lora_serve.server.openai.protocol import GenerationBody, ScheduledBody
from lora_serve.structured_outputs import ReasoningTokens

# To write more would delay other requests' tokens.
MANY_LOGPROBS = 400  # with their alternatives
MANY_TOKENS = 4096
MANY_EMBEDDING_BYTES = 2**15
BEGUN_AT_ONCE = 32  # of the requests of a body, between which others have their turn


class AnswerPrefix(StrEnum):
    """What stands before a request's id in its answer's; `/abort_requests` knows it by either."""

    COMPLETION = "cmpl-"
    CHAT = "chatcmpl-"
    EMBEDDING = "embd-"
    POOLING = "pooling-"
    SCORE = "score-"
    MESSAGE = "msg_"
    RESPONSE = "resp_"
    TOKENS = "generate-tokens-"
    NONE = ""


T = TypeVar("T")
PromptDelta = tuple[int, OutputDelta]  # index of the prompt, and what is new for it


class Answer(Protocol):
    """One format of answers. stream_form: how its streams tell of errors, and end."""

    @property
    def stream_form(self) -> StreamForm: ...

    def whole(self, outputs: Sequence[RequestOutput]) -> msgspec.Struct | Sequence[msgspec.Struct]:
        """The answer, once all prompts are finished."""

    def events(self, deltas: AsyncIterator[PromptDelta]) -> AsyncIterator[bytes]:
        """The answer piece by piece, as server-sent events."""


class Generation:
    """The deltas of all prompts as they come. `aclose` aborts in the engine what still grows."""

    def __init__(
        self,
        engine: Engine,
        target: ModelTarget,
        requests: Sequence[GenerateRequest],
        record: RequestRecord,
        names: AdapterNames,
        field_names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """record: takes in what is asked and answered.

        field_names: what the body calls a field, where the engine calls it otherwise.
        """
        record.note_asked(target.shown, requests)
        self.record = record
        self._target = target
        self._names = names
        self._field_names = field_names
        self._requests = requests
        self._first: PromptDelta | None = None
        self._group = group = RequestGroup(
            sum(request.params.n for request in requests),
            sum(request.params.n * request.prompt.num_tokens for request in requests),
        )
        self._deltas = _merged([engine.generate(request, group) for request in requests], group)

    async def wait_for_first(self) -> None:
        """Wait until something is there to be sent. What is wrong with a request shows here."""
        try:
            with field_names(self._field_names):
                await self._names.admit(self._target.lora_name)
                self._first = await anext(self._deltas)
        except AdapterNotFoundError as error:
            raise as_asked_for(error, self._target) from error

    async def deltas(self) -> AsyncIterator[PromptDelta]:
        assert self._first is not None, "wait_for_first comes before deltas"
        note = self.record.note
        note(*self._first)
        yield self._first
        async for item in self._deltas:
            note(*item)
            yield item

    async def outputs(self) -> list[RequestOutput]:
        """All prompts, finished."""
        outputs = [
            RequestOutput("", list(request.prompt.token_ids), num_choices=request.params.n)
            for request in self._requests
        ]
        async for index, delta in self.deltas():
            outputs[index].add(delta)
        return outputs

    async def aclose(self) -> None:
        """End what still grows; what the client did not wait for was generated all the same."""
        await self._deltas.aclose()
        unread, self._group.unread = self._group.unread, []
        indices = {request.request_id: index for index, request in enumerate(self._requests)}
        for request_id, delta in unread:
            self.record.note(indices[request_id], delta)


async def respond(
    request: Request, generation: Generation, answer: Answer, *, stream: bool
) -> Response:
    """The answer in one piece, or as a stream whose head is sent with its first delta."""
    if not stream:
        return await respond_whole(request, generation, answer.whole)
    try:
        await unless_disconnected(request.receive, generation.wait_for_first())
    except BaseException:
        await generation.aclose()
        raise
    return EventStream(answer.events(generation.deltas()), generation.aclose, answer.stream_form)


async def respond_whole(
    request: Request,
    generation: Generation,
    answer: Callable[[Sequence[RequestOutput]], msgspec.Struct | Sequence[msgspec.Struct]],
) -> Response:
    """The answer in one piece, made of all prompts once they are finished."""
    try:
        await unless_disconnected(request.receive, generation.wait_for_first())
        outputs = await unless_disconnected(request.receive, generation.outputs())
        if _is_large(outputs):
            return await asyncio.to_thread(lambda: json_response(answer(outputs)))
        return json_response(answer(outputs))
    except BaseException:
        await generation.aclose()
        raise


async def written(delta: OutputDelta, write: Callable[[], T]) -> T:
    """Write what a delta brings, in a thread if it is so much that other tokens would wait."""
    return await asyncio.to_thread(write) if delta.num_logprobs > MANY_LOGPROBS else write()


def _is_large(outputs: Sequence[RequestOutput]) -> bool:
    choices = [choice for output in outputs for choice in output.outputs]
    num_logprobs = sum(
        count_logprobs(output.prompt_logprobs) * output.num_choices for output in outputs
    )
    num_logprobs += sum(count_logprobs(choice.logprobs) for choice in choices)
    num_tokens = sum(len(output.prompt_token_ids) * output.num_choices for output in outputs)
    num_tokens += sum(len(choice.token_ids) for choice in choices)
    num_bytes = sum(len(output.embedding) for output in outputs)
    is_long = num_tokens > MANY_TOKENS or num_bytes > MANY_EMBEDDING_BYTES
    return num_logprobs > MANY_LOGPROBS or is_long


def reasoning_tokens(
    engine: Engine, form: ReasoningFormat | None, ending: str, params: SamplingParams
) -> ReasoningTokens | None:
    """What marks the reasoning of an answer, where that decides which tokens are drawn.

    ending: of the prompt, as text.
    """
    waits = not engine.config.structured_outputs.structured_outputs_enable_in_reasoning
    if form is None or not params.needs_reasoning(grammars_wait=waits):
        return None
    return form.tokens(partial(engine.tokenizer.encode, add_special_tokens=False), ending)


def start_generation(
    context: ServerContext,
    request: Request,
    body: GenerationBody,
    target: ModelTarget,
    prompts: Sequence[tuple[Input, SamplingParams]],
    special_tokens: Iterable[str] = (),
) -> Generation:
    """Make the requests; nothing runs before the first delta is waited for.

    special_tokens: stay in the text if the tokenizer has them.
    """
    transfer = body.kv_transfer_params
    check_kv_transfer(transfer, context.engine.config.kv_tiers)
    token_ids = map(context.engine.tokenizer.special_token_id, special_tokens)
    shown = tuple(token_id for token_id in token_ids if token_id is not None)
    requests = [
        msgspec.structs.replace(
            made,
            is_streamed=bool(body.stream),
            shown_special_tokens=shown,
            do_remote_decode=transfer is not None and transfer.do_remote_decode,
        )
        for made in scheduled_requests(context, request, body, target, prompts)
    ]
    # Without a field of its own, a body's constraint comes of the tools that must be called.
    called = {"structured_outputs": constraint_field(body) or "tools"}
    return Generation(context.engine, target, requests, record_of(request), context.names, called)


def scheduled_requests(
    context: ServerContext,
    request: Request,
    body: ScheduledBody,
    target: ModelTarget,
    prompts: Sequence[tuple[Input, SamplingParams]],
) -> list[GenerateRequest]:
    """One for each prompt, not streamed."""
    priority, caller = body.priority or 0, caller_of(request)
    if context.engine.config.scheduler.scheduling_policy == "priority":
        context.keys.check_priority(caller, priority)
    unique = uuid.uuid4().hex  # clients may repeat ids they choose
    return [
        GenerateRequest(
            request_id=f"{unique}-{index}",
            client_request_id=body.request_id or id_of(request),
            route=route_of(request.scope) or "",
            prompt=item.prompt,
            params=params,
            lora_name=target.lora_name,
            cache_salt=context.keys.cache_salt(caller, body.cache_salt),
            priority=priority,
            tenant=context.keys.tenant(caller),
            is_streamed=False,
        )
        for index, (item, params) in enumerate(prompts)
    ]


def response_id(prefix: AnswerPrefix, request: Request, body: ScheduledBody) -> str:
    """The id that the client chose, in the body or as X-Request-Id, or one of our own."""
    given = request.headers.get(HEADER, "")
    if len(given) > MAX_CHARS:
        raise InvalidRequestError(
            f"{HEADER} has {len(given)} characters, at most {MAX_CHARS} are allowed", HEADER
        )
    return f"{prefix}{body.request_id or id_of(request)}"


async def _merged(
    streams: Sequence[AsyncGenerator[OutputDelta, None]], group: RequestGroup
) -> AsyncGenerator[PromptDelta, None]:
    """The deltas of a group's requests, which begin a few at a time beside what others do."""
    if len(streams) == 1:  # the usual case, without a task and a queue between
        async with aclosing(streams[0]) as stream:
            async for delta in stream:
                yield 0, delta
        return
    # One place, so that what a slow reader leaves waits in the engine's states, which bound it.
    queue: asyncio.Queue[PromptDelta | Exception | None] = asyncio.Queue(maxsize=1)
    pumps: list[asyncio.Task[None]] = []
    try:
        for index, stream in enumerate(streams):
            pumps.append(asyncio.create_task(_pump(index, stream, queue)))
            if len(pumps) % BEGUN_AT_ONCE == 0:
                await asyncio.sleep(0)
        num_running = len(pumps)
        while num_running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        group.close()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    index: int,
    stream: AsyncGenerator[OutputDelta, None],
    queue: asyncio.Queue[PromptDelta | Exception | None],
) -> None:
    """Move one prompt's deltas into the common queue; then its error, or None."""
    try:
        async with aclosing(stream):
            async for delta in stream:
                await queue.put((index, delta))
        await queue.put(None)
    except Exception as error:
        await queue.put(error)
