"""What a response says of an answer: whole, as events, or at any moment between."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
from msgspec import UNSET

from lora_serve.chat.call_ids import CallIds
from lora_serve.chat.history import PastArguments
from lora_serve.chat.token_kinds import Kind
from lora_serve.chat.tools import ToolChoice
from lora_serve.config import ServerConfig
from lora_serve.errors import OverloadedError
from lora_serve.outputs import OutputDelta, RequestOutput
from lora_serve.server.engine_api import Engine
from lora_serve.server.http.errors import fault_of, status_and_type
from lora_serve.server.http.json_response import encode
from lora_serve.server.http.streaming import OPENAI_FORM
from lora_serve.server.openai.answers import TokenLogprob, Usage
from lora_serve.server.openai.chat_plan import ChatPlan
from lora_serve.server.openai.generation import (
    MANY_LOGPROBS,
    AnswerPrefix,
    PromptDelta,
    written,
)
from lora_serve.server.openai.kv_transfer import answered
from lora_serve.server.openai.logprobs import chat_logprobs
from lora_serve.server.openai.parameters import tokens_as_ids
from lora_serve.server.openai.told_tokens import ToldTokens, token_kinds
from lora_serve.server.openai.usage import UsageCounter
from lora_serve.server.responses.answers import (
    FunctionCall,
    IncompleteDetails,
    InputTokensDetails,
    Json,
    OutputItem,
    OutputMessage,
    OutputTokensDetails,
    ReasoningOutput,
    Response,
    ResponseError,
    ResponseUsage,
)
from lora_serve.server.responses.events import (
    Completed,
    Created,
    Event,
    EventWriter,
    Failed,
    Incomplete,
    InProgress,
)
from lora_serve.server.responses.items import CallItem, Item, ReasoningText, TextItem
from lora_serve.server.responses.output import Output
from lora_serve.server.responses.protocol import ResponseBody

S = TypeVar("S", bound=msgspec.Struct)
STATUSES = {"length": "incomplete", "abort": "cancelled"}  # by finish_reason; else "completed"


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """What an answer is told with. keep: takes a streamed response that has ended well."""

    engine: Engine
    config: ServerConfig
    body: ResponseBody
    plan: ChatPlan
    response_id: str
    is_stored: bool
    keep: Callable[[Response, bytes], None]


class ResponseAnswer:
    """One body's answer. Its stream's last event says that it is the last."""

    stream_form = dataclasses.replace(OPENAI_FORM, end=b"")

    def __init__(self, form: ResponseForm) -> None:
        self._form = form
        plan, engine = form.plan, form.engine
        unique = form.response_id.removeprefix(AnswerPrefix.RESPONSE)
        self._usage = UsageCounter(engine.model_info.fingerprint, [plan.item], tells_reasoning=True)
        tools = plan.form.tools
        are_short = tools is not None and tools.has_short_ids
        self._output = Output(CallIds(plan.item.token_ids, are_short=are_short), unique)
        self._parser = plan.form.parser(plan.item.ending)
        self._tokens = ToldTokens(
            token_kinds(
                plan.form,
                plan.item.ending,
                engine.tokenizer,
                skip_special_tokens=plan.params.skip_special_tokens,
                finds_calls=form.body.shows_logprobs,
            ),
            self._usage,
            {Kind.CONTENT},
        )
        self._token_ids: list[int] = []
        self._num_logprobs = 0
        self._finish_reason: str | None = None
        self.response = _new_response(form)

    def whole(self, outputs: Sequence[RequestOutput]) -> Response:
        (output,) = outputs
        (choice,) = output.outputs
        self._usage.add_output(0, output)
        self._take(choice.delta)
        moved = answered(outputs, self._form.response_id)
        return msgspec.structs.replace(self._end(), kv_transfer_params=moved or UNSET)

    async def events(self, deltas: AsyncIterator[PromptDelta]) -> AsyncIterator[bytes]:
        """Server-sent events, of which the last says how it ended, also with an error."""
        write = EventWriter().write
        self.response = self.at("in_progress")
        yield write(Created(response=self.response))
        yield write(InProgress(response=self.response))
        try:
            async for _, delta in deltas:
                self._usage.add(0, delta)
                for event in await written(delta, partial(self._take, delta)):
                    yield await self._written(write, event)
            final = self._end()
            if self._form.is_stored:
                self._form.keep(final, await self._written(encode, final))
        except Exception as error:
            yield write(Failed(response=self.failed(error)))
            return
        is_whole = final.status == "completed"
        last: Event = Completed(response=final) if is_whole else Incomplete(response=final)
        yield await self._written(write, last)

    async def _written(self, write: Callable[[S], bytes], what: S) -> bytes:
        """Write it in a thread if it may hold so much that other requests would wait."""
        if self._num_logprobs > MANY_LOGPROBS:
            return await asyncio.to_thread(write, what)
        return write(what)

    def at(self, status: str) -> Response:
        """The response while it has no answer yet, or will have none."""
        return msgspec.structs.replace(self.response, status=status)

    def failed(self, error: Exception) -> Response:
        """The response whose answer ended with an error, with what there is of it."""
        fault = fault_of(error)
        return msgspec.structs.replace(
            self.at("failed"),
            error=ResponseError(_error_code(error), fault.message),
            output=list(self._output.items),
        )

    def _take(self, delta: OutputDelta) -> list[Event]:
        is_last = delta.finish_reason is not None
        told = self._tokens.of(delta)
        hides = not self._form.plan.form.include_reasoning
        self._token_ids += told.token_ids if hides else delta.token_ids
        parts = self._parser.feed(delta.text)
        if is_last:
            self._finish_reason = delta.finish_reason
            parts += self._parser.finish()
        events = self._output.add(parts, self._logprobs(told))
        return events + (self._output.finish(is_cut=self._status != "completed") if is_last else [])

    @property
    def _status(self) -> str:
        """The status of the response that has ended."""
        return STATUSES.get(self._finish_reason or "", "completed")

    def _logprobs(self, told: OutputDelta) -> list[TokenLogprob]:
        form = self._form
        if not form.body.shows_logprobs:
            return []
        self._num_logprobs += told.num_logprobs
        as_ids = tokens_as_ids(form.plan.body, form.config)
        return chat_logprobs(
            form.engine.tokenizer,
            told.logprobs,
            tokens_as_ids=as_ids,
            tells_drawn=bool(form.plan.params.logprob_token_ids),
        ).content

    def _end(self) -> Response:
        status = self._status
        is_cut = status == "incomplete"
        self.response = msgspec.structs.replace(
            self.response,
            status=status,
            completed_at=None if status == "cancelled" else int(time.time()),
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
            output=list(self._output.items),
            usage=_usage(self._usage.usage),
            system_fingerprint=self._usage.fingerprint,
            token_ids=self._token_ids if self._form.body.return_token_ids else UNSET,
        )
        return self.response


def answered_items(output: Sequence[OutputItem]) -> list[Item]:
    """An answer as the next request has it in its input."""
    items: list[Item] = []
    for item in output:
        match item:
            case OutputMessage():
                items.append(TextItem("assistant", "".join(part.text for part in item.content)))
            case ReasoningOutput():
                items.append(ReasoningText("".join(part.text for part in item.content)))
            case FunctionCall():
                items.append(CallItem(item.call_id, item.name, _arguments(item.arguments)))
    return items


def _error_code(error: Exception) -> str:
    """Tell a wrong request from a busy server and from a failure, in OpenAI's words."""
    if isinstance(error, OverloadedError):
        return "rate_limit_exceeded"
    return "invalid_prompt" if status_and_type(error)[0] == 400 else "server_error"


def _arguments(text: str) -> PastArguments:
    """The arguments of a call; one that was cut off in the middle has none that can be read."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    return PastArguments(value, text) if isinstance(value, dict) else PastArguments({}, "{}")


def _usage(usage: Usage) -> ResponseUsage:
    cached, details = usage.prompt_tokens_details, usage.completion_tokens_details
    assert details is not UNSET, "a response's usage tells how many tokens were reasoning"
    assert details.reasoning_tokens is not UNSET, "a response's usage tells how many were reasoning"
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(
            cached.cached_tokens, cached.cached_tokens_by_tier or UNSET
        ),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(details.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )


def _new_response(form: ResponseForm) -> Response:
    body, params = form.body, form.plan.params
    reasoning, text = body.reasoning, body.text
    return Response(
        id=form.response_id,
        created_at=int(time.time()),
        status="queued",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=form.plan.target.shown,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        prompt_cache_retention=(body.prompt_cache_retention or "").replace("-", "_") or None,
        reasoning={
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary,
        },
        safety_identifier=body.safety_identifier,
        store=form.is_stored,
        temperature=params.temperature,
        text={
            "format": body.text_format.shown,
            "verbosity": (None if text is None else text.verbosity) or "medium",
        },
        tool_choice=_shown_choice(body.tool_choice or ToolChoice("auto")),
        tools=[
            {
                "type": "function",
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
                "strict": bool(tool.strict),
            }
            for tool in body.tools or ()
        ],
        top_logprobs=body.top_logprobs or 0,
        top_p=params.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )


def _shown_choice(choice: ToolChoice) -> str | Json:
    if choice.allowed is not None:
        tools = [{"type": "function", "name": name} for name in choice.allowed]
        return {"type": "allowed_tools", "mode": choice.mode, "tools": tools}
    if choice.name is not None:
        return {"type": "function", "name": choice.name}
    return choice.mode
