"""Goodput: how many requests were answered within limits on what their users wait for.

Limits are KEY:MILLISECONDS, as in vLLM's bench. Keys: ttft, the time to the first token; tpot, the
mean time of each token after it; e2el, the whole answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from lora_serve.errors import ConfigError

KEYS = ("ttft", "tpot", "e2el")


class Timed(Protocol):
    """The part of a request's record that limits look at. tpot_seconds: None for one token."""

    @property
    def error(self) -> str | None: ...

    @property
    def ttft_seconds(self) -> float: ...

    @property
    def tpot_seconds(self) -> float | None: ...

    @property
    def e2e_seconds(self) -> float: ...

    @property
    def output_tokens(self) -> int: ...


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds; None where there is no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    @classmethod
    def parse(cls, pairs: Sequence[str]) -> Limits:
        """Read KEY:MILLISECONDS. Raises ConfigError for what is none."""
        limits: dict[str, float] = {}
        for pair in pairs:
            key, _, value = pair.partition(":")
            try:
                milliseconds = float(value)
            except ValueError:
                milliseconds = 0.0
            if key not in KEYS or not 0 < milliseconds < float("inf"):
                raise ConfigError(
                    f"--goodput {pair}: want KEY:MILLISECONDS with one of {', '.join(KEYS)} and a "
                    "time above 0, such as ttft:500"
                )
            limits[key] = milliseconds
        return cls(**limits)

    def kept_by(self, record: Timed) -> bool:
        """Whether a request was answered within the limits."""
        if record.error is not None:
            return False
        times = (
            (self.ttft, record.ttft_seconds),
            (self.tpot, record.tpot_seconds),
            (self.e2el, record.e2e_seconds),
        )
        return all(
            limit is None or seconds is None or 1e3 * seconds <= limit for limit, seconds in times
        )

    def __str__(self) -> str:
        pairs = [f"{key} {getattr(self, key):g} ms" for key in KEYS if getattr(self, key)]
        return ", ".join(pairs) or "no limits"


class Goodput(msgspec.Struct, frozen=True):
    """Requests a second that kept the limits, their output tokens a second, and their share."""

    requests_per_second: float
    tokens_per_second: float
    share: float

    @classmethod
    def of(cls, records: Sequence[Timed], limits: Limits, wall_seconds: float) -> Goodput:
        kept = [record for record in records if limits.kept_by(record)]
        return cls(
            len(kept) / wall_seconds,
            sum(record.output_tokens for record in kept) / wall_seconds,
            len(kept) / max(1, len(records)),
        )
