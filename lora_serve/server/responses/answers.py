"""The structs of answers, as OpenAI's clients read them (`openai.types.responses`)."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from lora_serve.server.openai.answers import KVTransferParams, TokenLogprob

Json = dict[str, Any]


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Json] = []
    logprobs: list[TokenLogprob] = []


class ReasoningPart(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: str = "assistant"
    status: str
    content: list[OutputText]


class ReasoningOutput(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """summary: none is made."""

    id: str
    summary: list[Json] = []
    content: list[ReasoningPart]
    encrypted_content: None = None
    status: str


class FunctionCall(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"
):
    id: str
    call_id: str
    name: str
    arguments: str
    status: str


OutputItem = OutputMessage | ReasoningOutput | FunctionCall


class InputTokensDetails(msgspec.Struct, frozen=True):
    """cache_write_tokens: none is charged for."""

    cached_tokens: int
    cached_tokens_by_tier: dict[str, int] | UnsetType = UNSET
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A response at some moment.

    status: queued, in_progress, completed, incomplete, failed or cancelled. system_fingerprint: of
    the version that answered; "" until one has. token_ids: of the answer, with return_token_ids.
    """

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    prompt_cache_retention: str | None
    reasoning: Json
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: Json
    tool_choice: str | Json
    tools: list[Json]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None
    system_fingerprint: str = ""
    token_ids: list[int] | UnsetType = UNSET
    kv_transfer_params: KVTransferParams | UnsetType = UNSET


class DeletedResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "response"
    deleted: bool = True


class InputItemList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[Json]
    first_id: str
    last_id: str
    has_more: bool
