"""How lines of the log look, in the server's process and in the engine's.

A line may carry values besides its text: `extra=with_fields(name=value)`. In JSON each is a key of
its own; a text for readers says them in words.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime

from lora_serve.config.log import LogConfig

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_FIELDS = "lora_serve_fields"


def set_up_logging(config: LogConfig, process: str) -> None:
    """Log to stderr as `config` says. process: the name of this one, for lines in JSON."""
    handler = logging.StreamHandler()
    is_json = config.log_format == "json"
    handler.setFormatter(JsonFormatter(process) if is_json else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=True)


def with_fields(**fields: object) -> Mapping[str, object]:
    """The `extra` of a line that carries these values, each of which JSON can write."""
    return {_FIELDS: fields}


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
