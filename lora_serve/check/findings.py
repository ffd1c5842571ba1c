"""What a probe can find: that the server lacks something, or did what it must never do.

Knows neither probes nor how a server is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

JsonObject = dict[str, Any]


class Need(Enum):
    """What a server must offer for a probe to say anything."""

    ADAPTERS = "two adapters"
    LOADS = "routes that load and unload adapters"
    LOGPROBS = "logprobs"
    COLD = "a way to ask without the cache"
    CACHED_TOKENS = "counts of cached tokens"
    SALTS = "cache_salt"
    EMBEDS = "prompt_embeds"


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request as it was sent, and the beginning of what came back. status: 0 if nothing did."""

    method: str
    path: str
    body: JsonObject
    status: int = 0
    reply: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """What a server did that it must never do.

    right, wrong: the two answers, as text; empty where a failure is no wrong answer.
    is_rounding: they differ by no more than rounding could explain.
    """

    what: str
    where: str = ""
    right: str = ""
    wrong: str = ""
    hint: str = ""
    is_rounding: bool = False


class ProbeFailedError(Exception):
    """The server did what it must never do."""

    def __init__(self, violation: Violation) -> None:
        super().__init__(violation.what)
        self.violation = violation


class NotSupportedError(Exception):
    """The server lacks what the probe needs; the message says what, and how one may turn it on."""
