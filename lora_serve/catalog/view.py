"""What one replica knows of the catalog, what its engine has of it, and which requests it may take.

A state machine without a clock, a thread or a store: its owner tells it what the store said and
what the engine did, and does the work that it gives. Two rules keep an old version from answering
once a change is everywhere: a replica reports a name as done only after its engine has published
it, and a name that it cannot serve as the record says takes no requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from lora_serve.catalog.records import (
    MAX_UNLOADED,
    Change,
    Failure,
    Member,
    Record,
    Report,
    Snapshot,
)

MAX_GAP_SECONDS = 5.0  # between two signs of being awake; well below a lease (rollout.py)


class Admission(Enum):
    """What becomes of a request for a name.

    ADMIT: the engine may have it. WAIT: its version is on its way here. REFUSE: it cannot be served
    here. UNKNOWN: the catalog has no such name. ASK: the store must be asked first.
    """

    ADMIT = "admit"
    WAIT = "wait"
    REFUSE = "refuse"
    UNKNOWN = "unknown"
    ASK = "ask"


@dataclass(frozen=True, slots=True)
class Work:
    """Make the engine have `record`, where it has `before` now; None if it does not know the name.

    A record that is unloaded asks for the name to be taken away.
    """

    record: Record
    before: Record | None


class CatalogView:
    """One replica's. At most one piece of work for each name is under way at a time.

    member: this very process, which must be registered for requests to be admitted.
    """

    def __init__(self, member: Member, max_gap_seconds: float = MAX_GAP_SECONDS) -> None:
        self.member = member
        self._max_gap_seconds = max_gap_seconds
        self._last_awake: float | None = None
        self._is_current = False  # whether it was told all since it may last have slept
        self._serial = 0
        self._members: dict[str, Member] = {}
        self._first_generation = 0  # of names without a record, as in Snapshot
        self._wanted: dict[str, Record] = {}
        self._unloaded: OrderedDict[str, None] = OrderedDict()  # of these, latest last
        self._done: dict[str, Record] = {}  # what the engine has
        self._queue: OrderedDict[str, None] = OrderedDict()  # names to be worked on, next first
        self._under_way: dict[str, Record] = {}
        self._behind: set[str] = set()  # take no requests before they are done
        self._failed: dict[str, Failure] = {}

    # ── what the store says ─────────────────────────────────────────────────────────────────

    @property
    def serial(self) -> int:
        """The serial of the last change that it knows; all before it are known, too."""
        return self._serial

    @property
    def is_current(self) -> bool:
        """Whether requests may be admitted by what it knows."""
        return self._is_current

    def note_awake(self, now: float) -> None:
        """This process runs now. After a gap it has slept, and must ask the store first.

        Called every second or so, whether the store answers or not: its loss stops no answers.
        """
        if self._slept_until(now):
            self._is_current = False
        self._last_awake = now

    def must_ask(self) -> None:
        """Admit nothing before the next snapshot: others may have gone on without this replica."""
        self._is_current = False

    def take_snapshot(self, snapshot: Snapshot) -> bool:
        """Go on from everything at once, unless it is of before this process was registered.

        Names that are not done take no requests until they are; what the snapshot does not have any
        more was unloaded meanwhile. False: register first, since who is not registered is not
        waited for.
        """
        if self.member not in snapshot.members:
            return False
        self._first_generation = max(self._first_generation, snapshot.first_generation)
        wanted = {record.name: record for record in snapshot.records}
        known = self._wanted.keys() | self._done.keys() | self._under_way.keys()
        for name in known - wanted.keys():
            self._want(Record(name=name, serial=snapshot.serial), is_behind=True)
        for record in snapshot.records:
            self._want(record, is_behind=True)
        self._members = {member.replica_id: member for member in snapshot.members}
        self._serial = snapshot.serial
        self._is_current = True
        return True

    def take_change(self, change: Change) -> bool:
        """Go on by one change; False if there is a gap before it, for which a snapshot is needed.

        The version that answers now does so until the new one is done, unless this replica had to
        ask first: then others may have given it up.
        """
        if change.serial <= self._serial:
            return True
        if change.previous != self._serial:
            return False
        self._serial = change.serial
        if change.record is not None:
            self._want(change.record, is_behind=not self._is_current)
        if change.joined is not None:
            self._members[change.joined.replica_id] = change.joined
        if change.left is not None:
            self._members.pop(change.left, None)
        if self._members.get(self.member.replica_id) != self.member:
            self._is_current = False
        return True

    def snapshot(self) -> Snapshot:
        """All that it knows, for a store that has lost it."""
        return Snapshot(
            serial=self._serial,
            first_generation=self._first_generation,
            records=tuple(self._wanted.values()),
            members=tuple(self._members.values()),
        )

    # ── what the engine does ────────────────────────────────────────────────────────────────

    def take_work(self, limit: int) -> list[Work]:
        """What is to be done next, so that at most `limit` pieces are under way."""
        works = []
        while self._queue and len(self._under_way) < limit:
            name, _ = self._queue.popitem(last=False)
            record = self._under_way[name] = self._wanted[name]
            works.append(Work(record, self._done.get(name)))
        return works

    def note_done(self, record: Record) -> None:
        """The engine has published what this work asked for."""
        name = record.name
        del self._under_way[name]
        if record.is_unloaded:
            self._done.pop(name, None)
        else:
            self._done[name] = record
        if self._is_settled(name):
            self._failed.pop(name, None)
            self._settle(name)
        else:
            self._queue[name] = None

    def note_failed(self, record: Record, failure: Failure) -> None:
        """The engine cannot have it, and has no other version of the name any more either."""
        name = record.name
        del self._under_way[name]
        self._done.pop(name, None)
        if self._wanted[name].serial == record.serial:
            self._failed[name] = failure
        else:
            self._queue[name] = None

    def retry(self, name: str) -> None:
        """Work again on a name that has failed; requests are refused until it is done."""
        if name in self._failed and name not in self._under_way:
            self._queue[name] = None

    def prefer(self, name: str) -> None:
        """Let a name be worked on next, because requests wait for it."""
        if name in self._queue:
            self._queue.move_to_end(name, last=False)

    # ── what requests and operators ask ─────────────────────────────────────────────────────

    def admission(self, name: str, now: float) -> Admission:
        """What becomes of a request that comes now."""
        if not self._is_current or self._slept_until(now):
            return Admission.ASK
        if name in self._failed:
            return Admission.REFUSE
        if name in self._done and name not in self._behind:
            return Admission.ADMIT
        wanted = self._wanted.get(name)
        if wanted is None or wanted.is_unloaded:
            return Admission.UNKNOWN
        return Admission.WAIT

    def failure(self, name: str) -> Failure | None:
        return self._failed.get(name)

    @property
    def failed(self) -> Mapping[str, Failure]:
        """Names that take no requests here, with the reasons."""
        return self._failed

    def record(self, name: str) -> Record | None:
        """What the name stands for as far as is known; None if for nothing."""
        wanted = self._wanted.get(name)
        return None if wanted is None or wanted.is_unloaded else wanted

    def last_record(self, name: str) -> Record | None:
        """The name's record, which may be of one that was unloaded; None if none is known."""
        return self._wanted.get(name)

    def records(self) -> Iterator[Record]:
        """All names that stand for something."""
        return (record for record in self._wanted.values() if not record.is_unloaded)

    def ready(self) -> dict[str, int]:
        """The names whose records the engine has, with the serials of these."""
        return {
            name: record.serial
            for name, record in self._done.items()
            if name not in self._failed and self._is_settled(name)
        }

    def report(self) -> Report:
        """What others may rely on."""
        unfinished = (*self._queue, *self._under_way)
        return Report(
            serial=self._serial,
            loading={n: self._wanted[n].serial for n in unfinished if n not in self._failed},
            failed=dict(self._failed),
        )

    # ── parts ───────────────────────────────────────────────────────────────────────────────

    def _slept_until(self, now: float) -> bool:
        last = self._last_awake
        return last is not None and now - last > self._max_gap_seconds

    def _want(self, record: Record, *, is_behind: bool) -> None:
        name, known = record.name, self._wanted.get(record.name)
        self._wanted[name] = record
        self._unloaded.pop(name, None)
        if known is not None and known.serial == record.serial and name in self._failed:
            return
        self._failed.pop(name, None)
        if name in self._under_way:
            if is_behind:
                self._behind.add(name)
            return  # `note_done` looks again
        if self._is_settled(name):
            self._settle(name)
            return
        self._queue[name] = None
        if is_behind:
            self._behind.add(name)

    def _is_settled(self, name: str) -> bool:
        wanted, done = self._wanted[name], self._done.get(name)
        return done is None if wanted.is_unloaded else wanted.stands_for_the_same(done)

    def _settle(self, name: str) -> None:
        """The engine has what the record says: nothing is left to be done."""
        wanted = self._wanted[name]
        self._queue.pop(name, None)
        self._behind.discard(name)
        if not wanted.is_unloaded:
            self._done[name] = wanted  # the same version, perhaps under a newer serial
            return
        if not wanted.is_kept(self._first_generation):
            del self._wanted[name]  # nothing has to be remembered of it
            return
        self._unloaded[name] = None
        if len(self._unloaded) > MAX_UNLOADED:
            forgotten = self._wanted.pop(self._unloaded.popitem(last=False)[0])
            self._first_generation = max(self._first_generation, forgotten.generation)

    def check_invariants(self) -> None:
        """Assert what must hold after every operation."""
        names = self._queue.keys() | self._under_way.keys() | self._failed.keys()
        assert names <= self._wanted.keys(), f"work without a record: {names - set(self._wanted)}"
        assert not self._queue.keys() & self._under_way.keys(), "a name is worked on twice"
        assert not self._failed.keys() & self._done.keys(), "a name failed, yet its engine has it"
        for name in (self._wanted.keys() | self._done.keys()) - names:
            assert self._is_settled(name), f"{name} is not as its record says"
        unloaded = {name for name, wanted in self._wanted.items() if wanted.is_unloaded}
        assert unloaded - names == self._unloaded.keys(), "unloaded names are not counted"
        assert self._behind <= names, f"names wait for nothing: {self._behind - names}"
