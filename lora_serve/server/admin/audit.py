"""One line of the log for each call over HTTP that changes adapters, requests of others or caches.

It names a key by its place among the keys, never by its text. What a caller wrote is quoted and
cut, so that no body makes two lines or a long one.
"""

from __future__ import annotations

import logging
import time
from types import TracebackType

from lora_serve.errors import ChangeUnknownError
from lora_serve.observability.log import cut, quoted, with_fields
from lora_serve.server.admin.adapter_changes import AdapterChanges
from lora_serve.server.admin.answers import AdapterChange
from lora_serve.server.http.auth import Caller

logger = logging.getLogger(__name__)

NO_ADAPTER, UNKNOWN = "none", "unknown"  # in the place of a digest
MAX_TOLD = 10  # ids of requests in a line

Detail = str | int | tuple[str, ...]


class AdapterAudit:
    """A change that is under way. Its line is written where the `with` block ends."""

    def __init__(self, change: str, caller: Caller, changes: AdapterChanges | None = None) -> None:
        """changes: where it is kept, if an admin asked for it."""
        self._change = change
        self._caller = caller
        self._changes = changes
        self._name: str | None = None
        self._path: str | None = None
        self._old_path: str | None = None
        self._old = self._new = NO_ADAPTER
        self._serial: int | None = None

    def __enter__(self) -> AdapterAudit:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        failure = _failure(error)
        is_made = error is None
        if isinstance(error, ChangeUnknownError):
            is_made = error.digest is not None
            self._new = UNKNOWN if error.digest is None else error.digest or NO_ADAPTER
            is_same = self.is_unchanged
        else:
            is_same = self.is_unchanged or not is_made
        self._keep(None if is_made else failure)
        logger.log(
            _level(failure),
            "adapter %s by %s: name %s, path %s, digest %s, %s",
            self._change,
            self._caller.shown,
            quoted(self._name),
            quoted(self._path),
            "unchanged" if is_same else f"{self._old} -> {self._new}",
            _outcome(error),
            extra=with_fields(
                change=self._change,
                by=self._caller.shown,
                lora_name=_cut(self._name),
                lora_path=_cut(self._path),
                old_digest=self._old,
                new_digest=self._old if is_same else self._new,
                failure=_cut(failure),
            ),
        )

    @property
    def is_unchanged(self) -> bool:
        """Whether the same stands under the name as before, once both were noted."""
        return self._old == self._new

    def note_asked(self, name: str, path: str | None = None) -> None:
        """Note what the body names."""
        self._name, self._path = name, path

    def note_before(self, digest: str, path: str) -> None:
        """Note what stands under the name; nothing does if this is not called."""
        self._old, self._old_path, self._path = digest, path, self._path or path

    def note_after(self, digest: str) -> None:
        """Note what stands under the name in the end; nothing does if this is not called."""
        self._new = digest

    def note_serial(self, serial: int) -> None:
        """Note which change of the catalog it is."""
        self._serial = serial

    def _keep(self, failure: str | None) -> None:
        """Keep an admin's change; what others are refused must not push it out of the list."""
        if self._changes is None or self._name is None or not self._caller.is_admin:
            return
        is_loaded = self._new not in (NO_ADAPTER, UNKNOWN)
        self._changes.add(
            AdapterChange(
                time=time.time(),
                change=self._change,
                by=self._caller.shown,
                lora_name=cut(self._name),
                old_path=self._old_path,
                old_digest=None if self._old == NO_ADAPTER else self._old,
                new_path=self._path if is_loaded else None,
                new_digest=self._new if is_loaded else None,
                error=_cut(failure),
                serial=self._serial,
            )
        )


class CallAudit:
    """A pause, a resume, an abort or a reset. Its line is written where the `with` block ends."""

    def __init__(self, call: str, caller: Caller) -> None:
        self._call = call
        self._caller = caller
        self._details: dict[str, Detail] = {}

    def __enter__(self) -> CallAudit:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        failure = _failure(error)
        told = [f"{name} {_shown(value)}, " for name, value in self._details.items()]
        details = {name: _bounded(value) for name, value in self._details.items()}
        logger.log(
            _level(failure),
            "%s by %s: %s%s",
            self._call,
            self._caller.shown,
            "".join(told),
            _outcome(error),
            extra=with_fields(
                change=self._call, by=self._caller.shown, **details, failure=_cut(failure)
            ),
        )

    def note(self, **details: Detail) -> None:
        """Note what was asked for, and what came of it, by the names that the line has."""
        self._details |= details


def _failure(error: BaseException | None) -> str | None:
    return None if error is None else str(error) or type(error).__name__


def _outcome(error: BaseException | None) -> str:
    """How the line of a call ends: what was not refused must not read as if it were."""
    failure = _failure(error)
    if failure is None:
        return "done"
    if not isinstance(error, ChangeUnknownError):
        return f"failed: {quoted(failure)}"
    known = "not known whether made" if error.digest is None else "made, but not known where"
    return f"{known}: {quoted(failure)}"


def _level(failure: str | None) -> int:
    return logging.INFO if failure is None else logging.WARNING


def _shown(value: Detail) -> str:
    if isinstance(value, tuple):
        more = " …" if len(value) > MAX_TOLD else ""
        return " ".join(map(quoted, value[:MAX_TOLD])) + more
    return quoted(value) if isinstance(value, str) else str(value).lower()


def _bounded(value: Detail) -> Detail:
    if isinstance(value, tuple):
        return tuple(map(cut, value[:MAX_TOLD]))
    return cut(value) if isinstance(value, str) else value


def _cut(text: str | None) -> str | None:
    return None if text is None else cut(text)
