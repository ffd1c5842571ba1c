"""A workload as a file, one JSON object a line, to be replayed on any machine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from lora_serve.bench.workload import TimedRequest
from lora_serve.errors import ConfigError


def save_workload(requests: Sequence[TimedRequest], path: Path) -> None:
    """Write one JSON object a line, for replay."""
    path.write_bytes(b"".join(msgspec.json.encode(request) + b"\n" for request in requests))


def load_workload(path: Path) -> tuple[TimedRequest, ...]:
    """Read what save_workload wrote. Raises ConfigError naming the line that is not a request."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    requests = tuple(_parsed(lines, path))
    if not requests:
        raise ConfigError(f"{path}: no requests in it")
    return tuple(sorted(requests, key=lambda request: request.at_seconds))


def _parsed(lines: Sequence[bytes], path: Path) -> Iterable[TimedRequest]:
    for number, line in enumerate(lines, 1):
        try:
            request = msgspec.json.decode(line, type=TimedRequest)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise ConfigError(f"{path}, line {number}: not a request: {error}") from error
        if not request.prompt_token_ids or request.max_tokens < 1 or request.at_seconds < 0:
            raise ConfigError(
                f"{path}, line {number}: want at least one prompt token, max_tokens of at least "
                "1 and at_seconds of at least 0"
            )
        yield request
