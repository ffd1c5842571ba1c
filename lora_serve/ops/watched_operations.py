"""Watches the operations that torch runs, one by one, while a context is open."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class OperationWatch(TorchDispatchMode):
    """Gives each operation within `with self` to `run`; what `run` calls goes to torch itself."""

    def __init__(self) -> None:
        super().__init__()
        self._is_looking = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled; torch would import its compiler, and Triton, to skip it."""
        return False

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Give what the operation is to give."""
        raise NotImplementedError

    def run_parts(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Give each operation that `func` is made of to `run`; NotImplemented if it has none."""
        with self:
            return func.decompose(*args, **kwargs)

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Let operations pass as they are."""
        was_looking, self._is_looking = self._is_looking, False
        try:
            yield
        finally:
            self._is_looking = was_looking

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self._is_looking:
            return self.run(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
