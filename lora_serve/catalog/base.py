"""The door for stores of a catalog: what a replica asks of one.

A store orders changes: each gets a serial above all earlier ones, in one step with the check of
what it was planned on. It watches, it is not polled: `changes` and `await_reports` return when
there is something. Every method may block, is called from threads, and raises
CatalogUnavailableError where the store cannot be asked or refuses; what it did then is not known.
"""

from __future__ import annotations

from typing import Protocol

from lora_serve.catalog.records import Change, Member, Record, Report, Snapshot, Standing


class CatalogStore(Protocol):
    """Thread-safe. A test that every store must pass is in tests/catalog/test_base.py."""

    @property
    def where(self) -> str:
        """What it is called in messages, without a password."""

    def ping(self) -> None:
        """See that the store answers."""

    def snapshot(self) -> Snapshot:
        """Everything, as it was at one moment."""

    def changes(self, since: int, seconds: float) -> list[Change]:
        """The changes after the one with the serial `since`, oldest first; waits for the first.

        Nothing if none came in so many seconds. Where changes are not kept any more, the first one
        that is has another `previous` than `since`.
        """

    def get(self, name: str) -> Record | None:
        """The name's record, which may be of one that was unloaded.

        If none is kept: None, or one with the serial 0 where the name is to begin with a
        generation above 0.
        """

    def put(self, record: Record, expected: int) -> Record | None:
        """Write a record, if the name's has the serial `expected`, which is 0 where there is none.

        Returns it with its serial; None if another change came first. The record of an unloaded
        name stays if it `is_kept`. Beyond MAX_UNLOADED of these, the one that was unloaded first is
        forgotten, and names without a record begin with its generation, if that is higher than
        where they began: KV of before a reset stays out of reach.
        """

    def join(self, member: Member) -> None:
        """Register a replica, in place of an earlier process with its id; it has reported nothing.

        All changes after this one are seen by a snapshot that it takes now.
        """

    def renew(self, member: Member, report: Report) -> Member | None:
        """Say that the replica is there, and what it has done.

        Returns who is registered under its id: None after it was forgotten, another process where
        one took its place. Then nothing is written.
        """

    def leave(self, replica_id: str, incarnation: str | None = None) -> bool:
        """Forget a replica, and if an incarnation is given only this one; False without it."""

    def standings(self) -> list[Standing]:
        """All registered replicas, by their ids."""

    def await_reports(self, seen: int, seconds: float) -> int:
        """Wait until there is a report, or a replica more or less, after the one numbered `seen`.

        Returns the newest one's number, after so many seconds also if it is `seen` itself; at once
        with a number of -1.
        """

    def restore(self, snapshot: Snapshot) -> None:
        """Give a store that was started anew what it may have lost, if a replica knows more.

        Until a replica has done so, such a store takes no changes. A store that cannot lose what it
        was told has nothing to do.
        """

    def close(self) -> None: ...
