"""One line of the log for each request that generates, once it has been answered or given up.

It holds no prompt and no answer, unless --log-prompts; a key is named by its place among the keys.
What a client wrote is quoted and cut.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence

from starlette.types import Scope

from lora_serve.config import LogConfig
from lora_serve.generate_request import GenerateRequest
from lora_serve.identity import BASE_MODEL
from lora_serve.observability.log import cut, quoted, with_fields
from lora_serve.server.http.auth import Caller
from lora_serve.server.http.request_record import RequestRecord

logger = logging.getLogger(__name__)

_PLAIN = re.compile(r"[\w./:@+-]+", re.ASCII)
NO_KNOWN_KEY = "an unknown key"
UNCHECKED_KEY = "an unchecked key"  # refused before the key was looked at, as during a shutdown


class AccessLog:
    """Writes the lines, if they are wanted."""

    def __init__(self, config: LogConfig, decode: Callable[[Sequence[int]], str]) -> None:
        """decode: the text of token ids, for --log-prompts."""
        self._is_on = not config.disable_log_requests
        self._max_text_chars = config.max_log_len if config.log_prompts and self._is_on else 0
        self._decode = decode

    def new_record(self) -> RequestRecord:
        return RequestRecord(self._max_text_chars)

    def tell(self, record: RequestRecord, scope: Scope, status: int) -> None:
        """Write the line of a request that has ended now, and was answered with this status."""
        if not (self._is_on and logger.isEnabledFor(logging.INFO)):
            return
        fields = _fields(record, scope, status)
        if self._max_text_chars and record.requests:
            fields["prompt"] = self._prompt(record.requests[0])
            fields["answer"] = record.text
        logger.info("%s", _shown(fields), extra=with_fields(**fields))

    def _prompt(self, request: GenerateRequest) -> str:
        """The beginning of a prompt's text; of rows that are no tokens there is none."""
        some = request.prompt.token_ids[: self._max_text_chars]
        return cut(self._decode(some), self._max_text_chars)


Fields = dict[str, object]


def _fields(record: RequestRecord, scope: Scope, status: int) -> Fields:
    state = scope["state"]
    fields: Fields = {
        "method": scope["method"],
        "route": scope["path"],
        "status": status,
        "id": cut(_request_id(record, state)),
        "by": _by(state.get("caller"), status),
        "total_seconds": round(time.monotonic() - record.arrival, 6),
    }
    if record.span is not None:
        fields["trace_id"] = record.span.trace_id
    if record.error:
        fields["error"] = record.error
    if not record.requests:
        return fields
    adapter = record.adapter
    return fields | {
        "model": cut(record.model),
        "lora_name": None if adapter is BASE_MODEL else adapter.name,
        "digest": None if adapter is BASE_MODEL else adapter.digest.hex(),
        "generation": None if adapter is BASE_MODEL else adapter.generation,
        "prompt_tokens": record.num_prompt_tokens,
        "cached_tokens": record.num_cached_tokens,
        "generated_tokens": record.num_output_tokens,
        "queue_seconds": _rounded(record.queue_seconds),
        "first_token_seconds": _rounded(record.first_token_seconds),
        "finish_reason": record.finish_reason or None,
    }


def _by(caller: Caller | None, status: int) -> str:
    if caller is not None:
        return caller.shown
    return NO_KNOWN_KEY if status == 401 else UNCHECKED_KEY


def _request_id(record: RequestRecord, state: dict[str, object]) -> str:
    """What the client calls it: in its body if it did so there, else as X-Request-Id has it."""
    if record.requests:
        return record.requests[0].client_request_id
    return str(state.get("request_id", ""))


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _shown(fields: Fields) -> str:
    """The line for readers."""
    parts = [
        f"{fields['method']} {fields['route']} {fields['status']}",
        f"id {_plain(fields['id'])}",
        f"by {fields['by']}",
    ]
    if "model" in fields:
        parts.append(_shown_model(fields))
        parts.append(f"{fields['prompt_tokens']} prompt tokens ({fields['cached_tokens']} cached)")
        parts.append(f"{fields['generated_tokens']} generated")
    for name in ("queue", "first_token", "total"):
        seconds = fields.get(f"{name}_seconds")
        if isinstance(seconds, float):
            parts.append(f"{name.replace('_', ' ')} {1000 * seconds:.1f} ms")
    parts += [str(fields[name]) for name in ("finish_reason", "error") if fields.get(name)]
    if "trace_id" in fields:
        parts.append(f"trace {fields['trace_id']}")
    for name in ("prompt", "answer"):
        if name in fields:
            parts.append(f"{name} {fields[name]!r}")
    return ", ".join(parts)


def _shown_model(fields: Fields) -> str:
    model = f"model {_plain(fields['model'])}"
    if fields["lora_name"] is None:
        return model
    return f"{model} (adapter {fields['digest']}-g{fields['generation']})"


def _plain(text: object) -> str:
    """A name as it is if nothing in it could be taken for the line's own, else quoted."""
    name = str(text)
    return name if _PLAIN.fullmatch(name) else quoted(name)
