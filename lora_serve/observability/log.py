"""How lines of the log look, in the server's process and in the engine's.

A line may carry values besides its text: `extra=with_fields(name=value)`. In JSON each is a key of
its own; a text for readers says them in words. Whatever a text holds, only the log itself begins a
line: what follows a line break is indented, and other control characters are escaped.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime

from lora_serve.config.log import LogConfig
from lora_serve.observability.escapes import escaped
from lora_serve.observability.log_writer import BackgroundHandler

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MAX_QUOTED_CHARS = 500
_FIELDS = "lora_serve_fields"


def set_up_logging(
    config: LogConfig, process: str, *, in_background: bool = True, label: str = ""
) -> None:
    """Log to stderr as `config` says.

    Args:
        process: the name of this one, for lines in JSON.
        label: what tells lines of text of this process from those of others like it.
        in_background: write in a thread. Without, this process has none yet, and may be forked.
    """
    file = sys.stderr.fileno()
    handler = BackgroundHandler(file) if in_background else logging.StreamHandler()
    is_json = config.log_format == "json"
    text_format = TEXT_FORMAT.replace("%(name)s", f"[{label}] %(name)s" if label else "%(name)s")
    handler.setFormatter(JsonFormatter(process) if is_json else TextFormatter(text_format))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=True)


def with_fields(**fields: object) -> Mapping[str, object]:
    """The `extra` of a line that carries these values, each of which JSON can write."""
    return {_FIELDS: fields}


def quoted(text: str | None) -> str:
    """What a caller wrote, cut, on one line; "unknown" for None."""
    return "unknown" if text is None else repr(cut(text))


def cut(text: str, max_chars: int = MAX_QUOTED_CHARS) -> str:
    return text[:max_chars]


class TextFormatter(logging.Formatter):
    """One line, or one with further lines that are indented."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if text.isprintable():
            return text
        first, *others = escaped(text, kept="\n\t").split("\n")
        return "\n  ".join([first, *(line.removeprefix("  ") for line in others)])


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, process, message; then its own values.

    error: the traceback, if there is one. No value of a line can take the place of these.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = dict(getattr(record, _FIELDS, {}))
        time = datetime.fromtimestamp(record.created, UTC)
        line |= {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
