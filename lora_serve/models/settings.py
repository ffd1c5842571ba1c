"""Typed reading of a JSON object that another program wrote.

Faults are collected, so that one answer names them all; a faulty setting reads as a harmless value.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TypeGuard

_MOST = 2**31 - 1  # of any count or size; kernels index with as many bits
_MOST_SHOWN = 80  # characters of a faulty value


def _is_positive(value: object) -> TypeGuard[int | float]:
    """Whether it is a number above 0 that a float holds."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 < value <= sys.float_info.max
    )


def _shown(value: object) -> str:
    return repr(value)[:_MOST_SHOWN]


class Contradiction(str):
    """A finding that no other implementation mends: what the config says cannot all be meant."""

    __slots__ = ()


class Settings:
    """A null is read like a key that is not there."""

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values
        self.findings: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str) -> object:
        return self._values.get(key)

    def is_null(self, key: str) -> bool:
        """Whether the key is there and says none, where a missing key means a default."""
        return key in self and self.get(key) is None

    def refuse(self, finding: str) -> None:
        if finding not in self.findings:
            self.findings.append(finding)

    def contradict(self, finding: str) -> None:
        """Refuse what the config says twice, and not alike."""
        self.refuse(Contradiction(finding))

    def objects(self) -> list[str]:
        """The keys of all that are objects."""
        return [key for key, value in self._values.items() if isinstance(value, dict)]

    def replaced(self, **values: object) -> Settings:
        """These settings with others in their place, sharing this one's findings."""
        changed = Settings({**self._values, **values})
        changed.findings = self.findings
        return changed

    def part(self, key: str) -> Settings:
        """The object below `key` (empty if there is none), sharing this one's findings."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, dict):
            self.refuse(f"{key} must be an object, is {_shown(value)}")
        part = Settings(value if isinstance(value, dict) else {})
        part.findings = self.findings
        return part

    def integer(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = _MOST
    ) -> int:
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            if value is not None:
                self.refuse(f"{key} must be a whole number from {least} on, is {_shown(value)}")
            return max(least, 1)
        if value > most:
            self.refuse(f"{key} is {_shown(value)}, the most is {most}")
            return max(least, 1)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive, finite number."""
        value = self._required(key, default)
        if _is_positive(value):
            return float(value)
        if value is not None:
            self.refuse(f"{key} must be a positive number, is {_shown(value)}")
        return 1.0

    def optional_number(self, key: str, default: float | None) -> float | None:
        """A positive, finite number, or None where the key is null or has no default."""
        is_none = self.is_null(key) or (key not in self and default is None)
        return None if is_none else self.number(key, default)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of positive, finite numbers."""
        values = self._required(key, None)
        if isinstance(values, list) and all(map(_is_positive, values)):
            return tuple(map(float, values))
        if values is not None:
            self.refuse(f"{key} must be a list of positive numbers, is {_shown(values)}")
        return ()

    def flag(self, key: str, default: bool) -> bool:
        value = self._required(key, default)
        if not isinstance(value, bool):
            self.refuse(f"{key} must be true or false, is {_shown(value)}")
            return default
        return value

    def text(self, key: str, default: str) -> str:
        value = self._required(key, default)
        if not isinstance(value, str):
            self.refuse(f"{key} must be a string, is {_shown(value)}")
            return default
        return value

    def _required(self, key: str, default: object) -> object:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            self.refuse(f"{key} is missing")
        return value
