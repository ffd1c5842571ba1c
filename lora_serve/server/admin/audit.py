"""One line of the log for each change of an adapter that was asked for over HTTP.

It names a key by its place among the keys, never by its text. What a caller wrote is quoted and
cut, so that no body makes two lines or a long one.
"""

from __future__ import annotations

import logging
from types import TracebackType

from lora_serve.server.http.auth import Caller

logger = logging.getLogger(__name__)

MAX_QUOTED_CHARS = 500
NO_ADAPTER = "none"


class AdapterAudit:
    """A change that is under way. Its line is written where the `with` block ends."""

    def __init__(self, change: str, caller: Caller) -> None:
        self._change = change
        self._caller = caller
        self._name: str | None = None
        self._path: str | None = None
        self._old = self._new = NO_ADAPTER

    def __enter__(self) -> AdapterAudit:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        is_same = error is not None or self._old == self._new
        logger.info(
            "adapter %s by %s: name %s, path %s, digest %s, %s",
            self._change,
            self._caller.shown,
            _quoted(self._name),
            _quoted(self._path),
            "unchanged" if is_same else f"{self._old} -> {self._new}",
            "done" if error is None else f"failed: {_quoted(str(error) or type(error).__name__)}",
        )

    def note_asked(self, name: str, path: str | None = None) -> None:
        """Note what the body names."""
        self._name, self._path = name, path

    def note_before(self, digest: str, path: str) -> None:
        """Note what stands under the name; nothing does if this is not called."""
        self._old, self._path = digest, self._path or path

    def note_after(self, digest: str) -> None:
        """Note what stands under the name in the end; nothing does if this is not called."""
        self._new = digest


def _quoted(text: str | None) -> str:
    return "unknown" if text is None else repr(text[:MAX_QUOTED_CHARS])
