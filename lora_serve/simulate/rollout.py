"""Adapters that are replaced while the fleet runs: the catalog's views in virtual time.

The store is the order in which changes come. Every replica hears of one after WATCH_SECONDS, has
its engine load the new version, and reports it as done when the engine has published it; until then
its old version answers, by the rules of `catalog/view.py`. A view holds only the names that are
ever replaced: the others never change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from lora_serve.catalog.records import Change, Member, Record, Snapshot, Standing
from lora_serve.catalog.rollout import rollout_of
from lora_serve.catalog.view import Admission, CatalogView
from lora_serve.errors import ConfigError
from lora_serve.messages import CallReply, LoadAdapter
from lora_serve.simulate.adapters import path_of
from lora_serve.simulate.events import EventQueue

WATCH_SECONDS = 0.02  # as a file is looked at; a server of Redis tells sooner
WORKS_AT_A_TIME = 4  # of a replica, as many as its loader reads at a time


class RollOut(msgspec.Struct, frozen=True):
    """A name that is replaced, and when."""

    name: str
    at_seconds: float

    @classmethod
    def parse(cls, text: str) -> RollOut:
        """Read NAME@SECONDS. Raises ConfigError for what is none."""
        name, _, seconds = text.rpartition("@")
        try:
            at_seconds = float(seconds)
        except ValueError:
            at_seconds = -1.0
        if not name or not 0 <= at_seconds < float("inf"):
            raise ConfigError(f"--roll-out {text}: must be NAME@SECONDS, such as adapter-0@30")
        return cls(name, at_seconds)


class RolledOut(msgspec.Struct, frozen=True):
    """seconds: from the change until no replica could answer with the version before."""

    name: str
    at_seconds: float
    seconds: float


class _Replica:
    """One replica's view, and what has to be done to follow it."""

    def __init__(self, number: int, records: Sequence[Record]) -> None:
        self.member = Member(replica_id=str(number), address="", incarnation="0")
        self.view = CatalogView(self.member)
        taken = self.view.take_snapshot(
            Snapshot(serial=len(records), records=tuple(records), members=(self.member,))
        )
        assert taken, "a replica is registered from the first on"
        for work in self.view.take_work(len(records)):
            self.view.note_done(work.record)

    def standing(self) -> Standing:
        return Standing(member=self.member, report=self.view.report(), silent_seconds=0.0)


@dataclass(eq=False)
class _Unfinished:
    """A change that is not everywhere. behind: the replicas that have not reported it as done."""

    record: Record
    begin: float
    behind: set[int]


class SimulatedCatalog:
    """load: has a replica's engine take in a message. roll_outs: in any order."""

    def __init__(
        self,
        roll_outs: Sequence[RollOut],
        num_replicas: int,
        events: EventQueue,
        load: Callable[[int, LoadAdapter], None],
    ) -> None:
        self._events = events
        self._load = load
        self._versions = dict.fromkeys((one.name for one in roll_outs), 0)
        records = [_record(name, 0, serial) for serial, name in enumerate(self._versions, 1)]
        self._serial = len(records)
        # Nobody follows a catalog in which nothing changes.
        followers = range(num_replicas if records else 0)
        self._replicas = [_Replica(number, records) for number in followers]
        self._calls: dict[int, tuple[int, Record]] = {}
        self._num_calls = 0
        self._unfinished: list[_Unfinished] = []
        self._replaced: list[str] = []
        self.rolled_out: list[RolledOut] = []
        for one in roll_outs:
            events.at(one.at_seconds, partial(self._change, one))

    def check_admitted(self, replica: int, name: str) -> None:
        """Assert that the replica may answer for the name now, with one version or the other."""
        if name in self._versions:
            admission = self._replicas[replica].view.admission(name, self._events.now)
            assert admission is Admission.ADMIT, f"{name} on {replica}: {admission}"

    def ended(self, reply: CallReply) -> None:
        """Go on when a load has ended."""
        assert reply.error is None, reply.error
        number, record = self._calls.pop(reply.call_id)
        self._replicas[number].view.note_done(record)
        self._work(number)
        self._note_standing(number)

    def take_replaced(self) -> list[str]:
        """The names that have changed since the last call."""
        replaced, self._replaced = self._replaced, []
        return replaced

    def _change(self, one: RollOut) -> None:
        self._versions[one.name] += 1
        self._serial += 1
        record = _record(one.name, self._versions[one.name], self._serial)
        change = Change(serial=self._serial, previous=self._serial - 1, record=record)
        behind = set(range(len(self._replicas)))
        self._unfinished.append(_Unfinished(record, self._events.now, behind))
        self._replaced.append(one.name)
        self._events.at(self._events.now + WATCH_SECONDS, partial(self._hear, change))

    def _hear(self, change: Change) -> None:
        for number, replica in enumerate(self._replicas):
            heard = replica.view.take_change(change)
            assert heard, "changes are heard in their order"
            self._work(number)

    def _work(self, number: int) -> None:
        for work in self._replicas[number].view.take_work(WORKS_AT_A_TIME):
            self._num_calls += 1
            self._calls[self._num_calls] = number, work.record
            self._load(
                number,
                LoadAdapter(
                    self._num_calls,
                    work.record.name,
                    work.record.source,
                    load_inplace=True,
                    digest=work.record.digest,
                ),
            )

    def _note_standing(self, number: int) -> None:
        """Look which changes this replica has now; of those that all have, tell."""
        standing = self._replicas[number].standing()
        for one in self._unfinished:
            if rollout_of(one.record, (standing,)).is_everywhere:
                one.behind.discard(number)
        finished = [one for one in self._unfinished if not one.behind]
        for one in finished:
            self._unfinished.remove(one)
            seconds = self._events.now - one.begin
            self.rolled_out.append(RolledOut(one.record.name, one.begin, seconds))


def _record(name: str, version: int, serial: int) -> Record:
    path = path_of(name, version)
    return Record(name=name, serial=serial, digest=path.encode().hex(), source=path)
