"""Answers of /generate, as SGLang's clients read them."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

SglangLogprob = tuple[float | None, int, str | None]
"""A log-probability, null where nothing predicts the token; the token's id; its text, if asked."""


class SglangFinish(msgspec.Struct, frozen=True, kw_only=True):
    """type: "stop" with what matched, "length" with how long the answer may be, or "abort"."""

    type: str
    matched: str | int | UnsetType | None = UNSET
    length: int | UnsetType = UNSET
    message: str | UnsetType = UNSET


class SglangMeta(msgspec.Struct, frozen=True, kw_only=True):
    """e2e_latency: seconds, once it has ended. weight_version: the model's, and the adapter's.

    Logprobs are those of the tokens so far; the top ones of a token are null where it has none.
    """

    id: str
    finish_reason: SglangFinish | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    e2e_latency: float | UnsetType = UNSET
    input_token_logprobs: list[SglangLogprob] | UnsetType = UNSET
    output_token_logprobs: list[SglangLogprob] | UnsetType = UNSET
    input_top_logprobs: list[list[SglangLogprob] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[SglangLogprob] | None] | UnsetType = UNSET


class SglangGenerated(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of one prompt, as far as it has come. index: which, in streams of several."""

    text: str
    output_ids: list[int]
    meta_info: SglangMeta
    index: int | UnsetType = UNSET
