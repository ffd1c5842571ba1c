"""A catalog's store in memory, whose link can be cut and whose last changes can be lost."""

from __future__ import annotations

import threading
import time

from msgspec.structs import replace

from lora_serve.catalog.records import (
    MAX_UNLOADED,
    Change,
    Member,
    Record,
    Report,
    Snapshot,
    Standing,
)
from lora_serve.errors import CatalogUnavailableError


class MemoryStore:
    """is_cut: every call is an error. silent: seconds since each replica was heard from.

    kept: the changes that there are to be read. max_unloaded: records of unloaded names it keeps.
    """

    where = "memory"
    max_unloaded = MAX_UNLOADED

    def __init__(self) -> None:
        self.is_cut = False
        self.silent: dict[str, float] = {}
        self.kept: list[Change] = []
        self._serial = 0
        self._first_generation = 0
        self._records: dict[str, Record] = {}
        self._members: dict[str, Member] = {}
        self._reports: dict[str, Report] = {}
        self._num_reports = 0
        self._changed = threading.Condition()

    def ping(self) -> None:
        self._check()

    def snapshot(self) -> Snapshot:
        with self._locked():
            records = sorted(self._records.values(), key=lambda record: record.serial)
            members = [self._members[key] for key in sorted(self._members)]
            return Snapshot(
                serial=self._serial,
                first_generation=self._first_generation,
                records=tuple(records),
                members=tuple(members),
            )

    def changes(self, since: int, seconds: float) -> list[Change]:
        end = time.monotonic() + seconds
        with self._locked():
            while True:
                if found := [change for change in self.kept if change.serial > since]:
                    return found
                if not self._changed.wait(max(0.0, end - time.monotonic())):
                    return []
                self._check()

    def get(self, name: str) -> Record | None:
        with self._locked():
            first = self._first_generation
            return self._records.get(name) or (
                Record(name=name, generation=first) if first else None
            )

    def put(self, record: Record, expected: int) -> Record | None:
        with self._locked():
            current = self._records.get(record.name)
            if (current.serial if current else 0) != expected:
                return None
            written = replace(record, serial=self._serial + 1)
            self._append(record=written)
            self._records.pop(record.name, None)
            if written.is_kept(self._first_generation):
                self._records[record.name] = written
            unloaded = [one for one in self._records.values() if one.is_unloaded]
            for first in unloaded[: -self.max_unloaded]:
                del self._records[first.name]
                self._first_generation = max(self._first_generation, first.generation)
            return written

    def join(self, member: Member) -> None:
        with self._locked():
            self._append(joined=member)
            self._members[member.replica_id] = member
            self._reports[member.replica_id] = Report()
            self._num_reports += 1

    def renew(self, member: Member, report: Report) -> Member | None:
        with self._locked():
            registered = self._members.get(member.replica_id)
            if registered == member and self._reports[member.replica_id] != report:
                self._reports[member.replica_id] = report
                self._num_reports += 1
            return registered

    def leave(self, replica_id: str, incarnation: str | None = None) -> bool:
        with self._locked():
            member = self._members.get(replica_id)
            if member is None or incarnation not in (None, member.incarnation):
                return False
            del self._members[replica_id]
            self._append(left=replica_id)
            self._num_reports += 1
            return True

    def standings(self) -> list[Standing]:
        with self._locked():
            return [
                Standing(
                    member=self._members[key],
                    report=self._reports[key],
                    silent_seconds=self.silent.get(key, 0.0),
                )
                for key in sorted(self._members)
            ]

    def await_reports(self, seen: int, seconds: float) -> int:
        with self._locked():
            if self._num_reports <= seen:
                self._changed.wait(seconds)
            self._check()
            return self._num_reports

    def restore(self, snapshot: Snapshot) -> None:
        with self._locked():
            pass

    def close(self) -> None:
        pass

    def _append(
        self, record: Record | None = None, joined: Member | None = None, left: str | None = None
    ) -> None:
        previous, self._serial = self._serial, self._serial + 1
        self.kept.append(
            Change(serial=self._serial, previous=previous, record=record, joined=joined, left=left)
        )
        self._changed.notify_all()

    def _locked(self) -> threading.Condition:
        self._check()
        return self._changed

    def _check(self) -> None:
        if self.is_cut:
            raise CatalogUnavailableError("the catalog in memory: cut off")
