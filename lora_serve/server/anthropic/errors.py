"""Errors as Anthropic's clients read them: by a type of their own for each status."""

from __future__ import annotations

import json

from lora_serve.server.http.errors import Fault, fault_of
from lora_serve.server.http.streaming import StreamForm

BAD_REQUEST, FAILED = "invalid_request_error", "api_error"
TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
FAILED_KINDS = ("RequestAbortedError",)  # a failure, whatever the status; nothing is overloaded


def anthropic_shape(fault: Fault, request_id: str) -> bytes:
    """{"type": "error", "error": {"type", "message"}, "request_id"}."""
    kind = TYPES.get(fault.status, FAILED if fault.status >= 500 else BAD_REQUEST)
    if fault.kind in FAILED_KINDS:
        kind = FAILED
    error = {"type": kind, "message": fault.message}
    return json.dumps({"type": "error", "error": error, "request_id": request_id}).encode()


def stream_form(request_id: str) -> StreamForm:
    """An error is an event, and nothing follows."""

    def error_event(error: BaseException) -> bytes:
        return b"event: error\ndata: " + anthropic_shape(fault_of(error), request_id) + b"\n\n"

    return StreamForm(error_event, b"")
