"""Writes a response's body as a chat's, which is then answered as any chat is.

So the same conversation has the same answer on both routes. What is wrong with a field is told by
its name in the body that was sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request

from lora_serve.errors import InvalidRequestError, PromptTooLongError
from lora_serve.sampling_params import verify_num_logprobs
from lora_serve.server.context import ServerContext
from lora_serve.server.openai.chat_plan import ChatPlan, plan_chat
from lora_serve.server.openai.fields import shared_fields
from lora_serve.server.openai.protocol import MAX_MESSAGES, ChatBody
from lora_serve.server.responses.items import Item, TextItem, chat_messages
from lora_serve.server.responses.protocol import ResponseBody

FEW_ITEMS = 64  # become messages so fast that no other request waits for it

# What is told of them again stands in the response, or has another form in a chat.
OWN_FIELDS = {
    *("tools", "top_logprobs", "stream_options", "store", "metadata", "user"),
    *("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "return_token_ids"),
}
SAME_FIELDS = shared_fields(ResponseBody, ChatBody, but=OWN_FIELDS)
OTHER_NAMES = {  # of a chat's fields
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
}


def chat_body(body: ResponseBody) -> ChatBody:
    """The chat that continues a conversation as the body asks for it, without its messages."""
    return ChatBody.model_construct(
        **{name: getattr(body, name) for name in SAME_FIELDS},
        messages=[],
        tools=[tool.of_chat for tool in body.tools or ()] or None,
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.shows_logprobs,
        top_logprobs=body.top_logprobs if body.shows_logprobs else None,
        response_format=body.text_format.constraint,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
    )


@dataclass(frozen=True, slots=True)
class ResponsePlan:
    """How a conversation is answered. items: what was kept of it."""

    chat: ChatPlan
    items: Sequence[Item]

    @property
    def num_tokens(self) -> int:
        return self.chat.item.num_tokens


@dataclass(frozen=True, slots=True)
class Conversation:
    """Items that may lose their oldest turns.

    num_first: items that stay in any case. starts: where the others may begin, the whole first.
    """

    items: Sequence[Item]
    num_first: int
    starts: Sequence[int]

    def kept(self, index: int) -> Sequence[Item]:
        """What is left when the others begin at starts[index]."""
        return (*self.items[: self.num_first], *self.items[self.starts[index] :])


async def plan_response(
    context: ServerContext, request: Request, body: ResponseBody, items: Sequence[Item]
) -> ResponsePlan:
    """Check everything, and with `truncation: auto` leave out the oldest items until they fit.

    What goes are whole turns, up to a message of the user; instructions and the messages of the
    system that the conversation begins with stay.

    Raises:
        InvalidRequestError: a field is out of its range, or excludes another.
        OverloadedError: others' texts take too long.
    """
    conversation = conversation_of(items, can_be_cut=body.truncation == "auto")
    engine = context.engine
    max_logprobs, vocab_size = engine.config.model.max_logprobs, engine.model_info.vocab_size
    verify_num_logprobs("top_logprobs", body.top_logprobs, max_logprobs, vocab_size)  # shown or not
    max_prompt = engine.model_info.max_model_len - max(1, body.max_output_tokens or 1)
    chat = chat_body(body)

    async def plan(index: int) -> ResponsePlan:
        kept = conversation.kept(index)
        return ResponsePlan(await _plan(context, request, chat, kept, body.instructions), kept)

    async def fitting(index: int) -> ResponsePlan | None:
        await asyncio.sleep(0)  # others' turn of the event loop: there may be a dozen tries
        try:
            made = await plan(index)
        except PromptTooLongError:
            return None
        return made if made.num_tokens <= max_prompt else None

    last = len(conversation.starts) - 1
    whole = await plan(0) if last == 0 else await fitting(0)
    if whole is not None:
        return whole
    shortest = await plan(last)  # if even this does not fit, nothing does
    low, high = 1, last if shortest.num_tokens <= max_prompt else 0
    while low < high:  # the first that fits lies in starts[low:high], or is starts[high]
        middle = (low + high) // 2
        made = await fitting(middle)
        if made is None:
            low = middle + 1
        else:
            shortest, high = made, middle
    return shortest


async def _plan(
    context: ServerContext,
    request: Request,
    chat: ChatBody,
    items: Sequence[Item],
    instructions: str | None,
) -> ChatPlan:
    if len(items) > FEW_ITEMS:
        messages = await asyncio.to_thread(chat_messages, items, instructions)
    else:
        messages = chat_messages(items, instructions)
    body = chat.model_copy(update={"messages": messages})
    return await plan_chat(context, request, body, tells_whole=True)


def conversation_of(items: Sequence[Item], *, can_be_cut: bool) -> Conversation:
    """The ways in which a conversation can be cut, those of more than MAX_MESSAGES left out.

    Raises:
        InvalidRequestError: there is none.
    """
    is_system = (isinstance(i, TextItem) and i.role in ("system", "developer") for i in items)
    num_first = next((index for index, found in enumerate(is_system) if not found), len(items))
    turns = [
        index
        for index, item in enumerate(items)
        if can_be_cut and index > num_first and isinstance(item, TextItem) and item.role == "user"
    ]
    earliest = len(items) + num_first - MAX_MESSAGES
    starts = [start for start in (num_first, *turns) if start >= earliest]
    if not starts:
        remedy = "shorten its last turn" if can_be_cut else "set truncation to auto"
        raise InvalidRequestError(
            f"the conversation has {len(items)} items with those of previous_response_id, at most "
            f"{MAX_MESSAGES} are allowed; {remedy}, or begin a new conversation",
            "previous_response_id",
        )
    return Conversation(items, num_first, starts)
