"""Several refusals in one error, so that a user does not meet them one start after another."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lora_serve.errors import ConfigError, LoraServeError


class Refusals:
    """Notes what checks refuse, and raises it when all of them have run."""

    def __init__(self) -> None:
        self._noted: list[LoraServeError] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Run a check; what it refuses is raised by `raise_noted`, other errors at once."""
        try:
            yield
        except LoraServeError as error:
            self.note(error)

    def note(self, error: LoraServeError) -> None:
        self._noted.append(error)

    def raise_noted(self) -> None:
        """Raise the one refusal as it is, or several as a ConfigError with a line for each.

        Raises:
            LoraServeError: something was refused.
        """
        if len(self._noted) == 1:
            raise self._noted[0]
        if self._noted:
            raise ConfigError("\n".join(dict.fromkeys(map(str, self._noted))))
