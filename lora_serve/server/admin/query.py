"""Reads the parameters behind a path's question mark, as strictly as fields of a body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from starlette.requests import Request

from lora_serve.errors import InvalidRequestError

FLAGS = ("true", "false", "1", "0")

Choice = TypeVar("Choice", bound=str)


class Query:
    """One request's parameters.

    Raises:
        InvalidRequestError: from all that read, for a parameter that is not as it must be.
    """

    def __init__(self, request: Request, *known: str) -> None:
        """Refuse parameters that are none of `known`."""
        self._values = request.query_params
        unknown = sorted(set(self._values) - set(known))
        if unknown:
            raise InvalidRequestError(
                f"unknown query parameters {unknown[:5]}; this path has "
                f"{', '.join(known) if known else 'none'}",
                unknown[0],
            )

    def text(self, name: str) -> str | None:
        return self._values.get(name)

    def one_of(self, name: str, choices: Sequence[Choice], default: Choice) -> Choice:
        value = self._values.get(name, default)
        for choice in choices:
            if value == choice:
                return choice
        raise InvalidRequestError(
            f"{name} must be one of {', '.join(choices)}, got {value[:80]!r}", name
        )

    def number(self, name: str, largest: int, default: int) -> int:
        """A whole number of 1 to `largest`."""
        value = self._values.get(name, str(default))
        is_number = value.isascii() and value.isdigit() and len(value) <= len(str(largest))
        if not (is_number and 1 <= int(value) <= largest):
            raise InvalidRequestError(f"{name} must be in [1, {largest}], got {value[:80]!r}", name)
        return int(value)

    def check_body(self, name: str, in_body: object) -> None:
        """Raise InvalidRequestError where the query and the body both have this, and differ."""
        if name not in self._values or in_body is None:
            return
        in_query = self._values[name]
        is_same = in_query in (("true", "1") if in_body else ("false", "0"))
        if not (is_same if isinstance(in_body, bool) else in_query == in_body):
            raise InvalidRequestError(
                f"{name} is {in_query[:80]!r} in the query and {in_body!r} in the body; give it "
                "once",
                name,
            )

    def flag(self, name: str, default: bool) -> bool:
        return self.one_of(name, FLAGS, FLAGS[0] if default else FLAGS[1]) in ("true", "1")
