"""Bodies of errors, as clients of OpenAI and vLLM read them, on each route that names no other."""

from __future__ import annotations

import msgspec


class ErrorDetail(msgspec.Struct, frozen=True):
    """param: the field at fault. code: the status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorAnswer(msgspec.Struct, frozen=True):
    """The body of every status above 399, unless a route's clients read another."""

    error: ErrorDetail


class AdapterErrorAnswer(msgspec.Struct, frozen=True):
    """The same of /v1/load_lora_adapter and its counterpart, with the fields as vLLM had them."""

    error: ErrorDetail
    object: str
    message: str
    type: str
    param: str | None
    code: int
