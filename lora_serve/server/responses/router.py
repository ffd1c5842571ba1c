"""POST /v1/responses, and what clients do with responses that were kept."""

from __future__ import annotations

import asyncio
import string
from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response as HTTPResponse

from lora_serve.errors import InvalidRequestError
from lora_serve.server.context import ServerContext
from lora_serve.server.field_names import field_names
from lora_serve.server.http.auth import caller_of
from lora_serve.server.http.errors import status_and_type
from lora_serve.server.http.json_response import encode, json_response
from lora_serve.server.openai.chat_plan import start_chat
from lora_serve.server.openai.generation import AnswerPrefix, Generation, respond, response_id
from lora_serve.server.responses.answer import ResponseAnswer, ResponseForm, answered_items
from lora_serve.server.responses.answers import DeletedResponse, InputItemList, Response
from lora_serve.server.responses.chat_body import OTHER_NAMES, plan_response
from lora_serve.server.responses.items import Item
from lora_serve.server.responses.protocol import ResponseBody
from lora_serve.server.responses.store import StoredResponse

MAX_LISTED = 100  # items, at once


def responses_router(context: ServerContext) -> APIRouter:
    router = APIRouter()
    store = context.responses

    def stored(request: Request, response_id: str) -> StoredResponse:
        return store.get(context.keys.tenant(caller_of(request)), response_id)

    @router.post("/v1/responses")
    async def create_response(request: Request) -> HTTPResponse:
        body = await context.bodies.read(request, ResponseBody)
        with field_names(OTHER_NAMES):
            return await _create(context, request, body)

    @router.post("/v1/responses/{response_id:path}/cancel")
    async def cancel_response(request: Request, response_id: str) -> HTTPResponse:
        found = stored(request, response_id)
        if found.task is None:
            raise InvalidRequestError(
                "Cannot cancel a synchronous response. Only one with `background` can be.",
                "response_id",
            )
        found.task.cancel()
        await asyncio.gather(found.task, return_exceptions=True)
        return _sent(found)

    @router.get("/v1/responses/{response_id:path}/input_items")
    async def list_input_items(request: Request, response_id: str) -> HTTPResponse:
        found = stored(request, response_id)
        return json_response(_listed(request, response_id, found.input_items))

    # Last, since an id that a client chose may hold slashes.
    @router.get("/v1/responses/{response_id:path}")
    async def show_response(request: Request, response_id: str) -> HTTPResponse:
        if request.query_params.get("stream", "false").lower() not in ("false", "0", ""):
            raise InvalidRequestError(
                "stream is not supported for a response that was kept; leave it out", "stream"
            )
        return _sent(stored(request, response_id))

    @router.delete("/v1/responses/{response_id:path}")
    async def delete_response(request: Request, response_id: str) -> HTTPResponse:
        store.delete(context.keys.tenant(caller_of(request)), response_id)
        return json_response(DeletedResponse(id=response_id))

    return router


async def _create(context: ServerContext, request: Request, body: ResponseBody) -> HTTPResponse:
    tenant, store = context.keys.tenant(caller_of(request)), context.responses
    _check_background(context, body)
    items: Sequence[Item] = (*_previous(context, tenant, body), *body.input)
    planned = await plan_response(context, request, body, items)
    plan, items = planned.chat, planned.items
    is_stored = store.is_on and body.store is not False
    own_id = response_id(AnswerPrefix.RESPONSE, request, plan.body)
    if is_stored:
        store.check_id(tenant, own_id)

    def keep(response: Response, body: bytes) -> None:
        if is_stored:
            output_items = answered_items(response.output)
            store.put(tenant, response.id, response.status, body, items, output_items)

    form = ResponseForm(context.engine, context.config, body, plan, own_id, is_stored, keep)
    answer = ResponseAnswer(form)
    generation = start_chat(context, request, plan)
    if body.background:
        queued = answer.response
        kept = store.put(tenant, queued.id, queued.status, encode(queued), items)
        generation.record.go_on_in_background()
        kept.task = asyncio.create_task(_run(context, tenant, answer, generation))
        await asyncio.sleep(0)  # it begins: a task that never did could not note its end
        return json_response(queued)
    streams = bool(body.stream)
    sent = await respond(request, generation, answer, stream=streams)
    if not streams:
        keep(answer.response, bytes(sent.body))
    return sent


async def _run(
    context: ServerContext, tenant: str, answer: ResponseAnswer, generation: Generation
) -> None:
    """Answer in the background. What comes of it is in the store, whatever that is.

    A server that shuts down waits for the answer as for any, but not for clients to fetch it.
    """

    def note(response: Response, body: bytes) -> None:
        output_items = answered_items(response.output)
        context.responses.update(tenant, response.id, response.status, body, output_items)

    fault = ""
    context.drain.enter()
    try:
        running = answer.at("in_progress")
        note(running, encode(running))
        with field_names(OTHER_NAMES):
            await generation.wait_for_first()
        outputs = await generation.outputs()
        final = await asyncio.to_thread(answer.whole, outputs)
        note(final, await asyncio.to_thread(encode, final))
    except asyncio.CancelledError:
        cancelled = answer.at("cancelled")
        note(cancelled, encode(cancelled))
    except Exception as error:
        fault = status_and_type(error)[1]
        failed = answer.failed(error)
        note(failed, encode(failed))
    finally:
        generation.record.background_ended(fault)
        context.drain.leave()
        await generation.aclose()


def _sent(stored: StoredResponse) -> HTTPResponse:
    return HTTPResponse(stored.body, media_type="application/json")


def _check_background(context: ServerContext, body: ResponseBody) -> None:
    if not body.background:
        return
    context.responses.require_on("background")
    if body.store is False:
        raise InvalidRequestError(
            "background can only be used when `store` is true; it is how the answer is fetched",
            "background",
        )
    if body.stream:
        raise InvalidRequestError(
            "background and stream exclude each other; ask for the response until it is there",
            "background",
        )


def _previous(context: ServerContext, tenant: str, body: ResponseBody) -> Sequence[Item]:
    """The conversation that the body continues."""
    if body.previous_response_id is None:
        return ()
    field = "previous_response_id"
    context.responses.require_on(field)
    found = context.responses.get(tenant, body.previous_response_id, field)
    if found.status not in ("completed", "incomplete"):
        raise InvalidRequestError(
            f"{field} names a response that is {found.status}; only one that has been answered "
            "can be continued",
            field,
        )
    return (*found.input_items, *found.output_items)


def _listed(request: Request, response_id: str, items: Sequence[Item]) -> InputItemList:
    """A page of items, the newest first unless the query says otherwise."""
    query = request.query_params
    limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
    is_number = limit.isascii() and limit.isdigit() and len(limit) <= len(str(MAX_LISTED))
    if not (is_number and 1 <= int(limit) <= MAX_LISTED):
        raise InvalidRequestError(f"limit must be in [1, {MAX_LISTED}], got {limit[:20]}", "limit")
    if order not in ("asc", "desc"):
        raise InvalidRequestError(f"order must be asc or desc, got {order[:20]}", "order")
    prefix = f"item_{response_id.removeprefix(AnswerPrefix.RESPONSE)}"
    places = range(len(items)) if order == "asc" else range(len(items) - 1, -1, -1)
    start = 0 if after is None else places.index(_place(after, prefix, len(items))) + 1
    page = [
        items[place].described(_item_id(prefix, place))
        for place in places[start : start + int(limit)]
    ]
    return InputItemList(
        data=page,
        first_id=page[0]["id"] if page else "",
        last_id=page[-1]["id"] if page else "",
        has_more=start + len(page) < len(items),
    )


def _item_id(prefix: str, place: int) -> str:
    return f"{prefix}{place:04x}"


def _place(item_id: str, prefix: str, num_items: int) -> int:
    """Where the item of this id stands.

    Raises:
        InvalidRequestError: it is none of these.
    """
    written = item_id.removeprefix(prefix)[:8]
    is_hex = written != "" and all(digit in string.hexdigits for digit in written)
    place = int(written, 16) if is_hex else num_items
    if place >= num_items or item_id != _item_id(prefix, place):
        raise InvalidRequestError(f"after names no item of this response: {item_id[:80]}", "after")
    return place
