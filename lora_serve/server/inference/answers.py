"""Bodies of answers under /inference/v1, as vLLM's clients read them."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

from lora_serve.server.openai.answers import KVTransferParams, PromptLogprobs, Usage


class GeneratedLogprob(msgspec.Struct, frozen=True):
    """rank: null for one of the request's logprob_token_ids that was not drawn."""

    token_id: int
    logprob: float
    rank: int | None


class GeneratedTokenLogprobs(msgspec.Struct, frozen=True):
    """top_logprobs: the token itself first, then the most likely others by rank, or those named."""

    token_id: int
    logprob: float
    rank: int
    top_logprobs: list[GeneratedLogprob]


class GeneratedLogprobs(msgspec.Struct, frozen=True):
    content: list[GeneratedTokenLogprobs]


class GeneratedChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of an answer or of a chunk. text: with the output_mode of that name."""

    index: int
    token_ids: list[int]
    text: str | UnsetType = UNSET
    logprobs: GeneratedLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Generated(msgspec.Struct, frozen=True, kw_only=True):
    """An answer; also a chunk, whose usage may be UNSET."""

    request_id: str
    model: str
    created: int
    choices: list[GeneratedChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    output_mode: str = "tokens"
    kv_transfer_params: KVTransferParams | None = None
