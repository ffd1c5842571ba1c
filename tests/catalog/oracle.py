"""Random lives of a fleet: replicas over one store, operators, faults, and every answer judged.

A life is a sequence of small steps, each by one replica or operator, drawn from a seed: nothing
runs at once, so whatever comes between two steps of one can come. A replica does what
lora_serve/catalog/replica.py does, without threads; its engine is a dict.

Judged: an answer is of a version that was the name's at some time (or of none where the name stood
for nothing), never of one before a change that was told to be everywhere when the request came, and
never of one before what the same process answered earlier. A name that was unloaded is never loaded
again by the --lora-modules of a replica that starts. Where nothing fails any more, every
replica comes to have what the store says.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from lora_serve.catalog import plan
from lora_serve.catalog.records import Failure, Member, Record
from lora_serve.catalog.rollout import rollout_of
from lora_serve.catalog.view import Admission, CatalogView, Work
from lora_serve.errors import AdapterExistsError, AdapterNotFoundError, CatalogUnavailableError
from tests.fakes.catalog_store import MemoryStore

NAMES = ("a", "b")
MAX_REPLICAS = 3
_REFUSALS = (AdapterExistsError, AdapterNotFoundError, plan.OtherStateError)
KEPT_CHANGES = 2  # so few that a replica that sleeps misses some


class WrongAnswerError(AssertionError):
    pass


@dataclass(eq=False)
class Replica:
    """has_files: whether it can read adapters now. under_way: work that its engine was given.

    has_modules: whether it has begun to load its --lora-modules, which are NAMES.

    answered, had: by name, the latest serial of an answer, and of work that has ended.
    """

    member: Member
    store: MemoryStore
    view: CatalogView = field(init=False)
    engine: dict[str, Record] = field(default_factory=dict)
    under_way: list[Work] = field(default_factory=list)
    is_cut: bool = False
    has_files: bool = True
    asleep_until: float = 0.0
    has_modules: bool = False
    answered: dict[str, int] = field(default_factory=dict)
    had: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.view = CatalogView(self.member)

    def keep(self, now: float) -> None:
        """Say that it is there, and ask for everything if it has to."""
        self.view.note_awake(now)
        self._check_link()
        if not self.view.is_current:
            self.catch_up()
            return
        self.store.silent[self.member.replica_id] = 0.0
        registered = self.store.renew(self.member, self.view.report())
        if registered != self.member:
            self.view.must_ask()

    def catch_up(self) -> None:
        if not self.view.take_snapshot(self.store.snapshot()):
            self.store.join(self.member)
            assert self.view.take_snapshot(self.store.snapshot()), "it has just been registered"

    def follow(self, count: int) -> None:
        self._check_link()
        for change in self.store.changes(self.view.serial, 0)[:count]:
            if not self.view.take_change(change):
                self.view.take_snapshot(self.store.snapshot())
                return

    def begin_work(self, limit: int) -> None:
        self.under_way += self.view.take_work(limit)

    def end_work(self, work: Work) -> None:
        """The engine publishes it, or cannot; then it has no version of the name any more."""
        self.under_way.remove(work)
        record = work.record
        self.had[record.name] = record.serial
        if record.is_unloaded:
            self.engine.pop(record.name, None)
        elif self.has_files:
            self.engine[record.name] = record
        else:
            self.forget(record.name)
            self.view.note_failed(record, Failure(record.serial, "no such file"))
            return
        self.view.note_done(record)

    def forget(self, name: str) -> None:
        self.engine.pop(name, None)

    def _check_link(self) -> None:
        if self.is_cut:
            raise CatalogUnavailableError("cut off")


@dataclass(eq=False)
class Call:
    """An operator's change, from its plan to its end; or one that a flag asks for."""

    replica: Replica
    change: plan.Plan
    name: str
    is_module: bool = False
    planned: Record | None = None
    expected: int = 0
    written: Record | None = None


class Fleet:
    """One life.

    claims: by name, the serial of the latest change that was told to be everywhere.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.store = MemoryStore()
        self.history: dict[str, dict[int, Record]] = {name: {} for name in NAMES}
        self.claims: dict[str, int] = dict.fromkeys(NAMES, 0)
        self.was_named = dict.fromkeys(NAMES, False)  # by --lora-modules
        self.replicas: list[Replica] = []
        self.calls: list[Call] = []
        self.num_answers = self.num_claims = self.num_made = 0
        for number in range(2):
            self._start(f"r{number}")

    def live(self, num_steps: int) -> None:
        weights = {
            self._keep: 12, self._follow: 12, self._begin_work: 10, self._end_work: 14,
            self._ask: 24, self._plan: 6, self._write: 12, self._conclude: 24, self._kill: 1,
            self._late: 1, self._sleep: 1, self._cut: 1, self._lose_files: 1, self._forget: 1,
            self._load_modules: 6,
        }  # fmt: skip
        steps = self.random.choices([*weights], [*weights.values()], k=num_steps)
        for step in steps:
            self.now += self.random.random() / 4
            for member_id in self.store.silent:
                self.store.silent[member_id] += 0.1
            self._do(step)
            for replica in self.replicas:
                replica.view.check_invariants()
        self._heal()

    def _do(self, step: Callable[[], None]) -> None:
        with contextlib.suppress(CatalogUnavailableError):
            step()
        self.store.kept = self.store.kept[-KEPT_CHANGES:]

    # ── replicas ────────────────────────────────────────────────────────────────────────────

    def _awake(self) -> Replica:
        self.now = max(self.now, min(one.asleep_until for one in self.replicas))
        return self.random.choice([one for one in self.replicas if one.asleep_until <= self.now])

    def _keep(self) -> None:
        self._awake().keep(self.now)

    def _follow(self) -> None:
        self._awake().follow(self.random.randint(1, 3))

    def _begin_work(self) -> None:
        self._awake().begin_work(self.random.randint(1, 2))

    def _end_work(self) -> None:
        replica = self._awake()
        if replica.under_way:
            replica.end_work(self.random.choice(replica.under_way))
        for name in [*replica.view.failed]:
            if replica.has_files:
                replica.view.retry(name)

    def _ask(self) -> None:
        """A request comes; what is to be judged is what was true when it did."""
        replica, name = self._awake(), self.random.choice(NAMES)
        admission = replica.view.admission(name, self.now)
        if admission not in (Admission.ADMIT, Admission.UNKNOWN):
            return
        record = replica.engine.get(name) if admission is Admission.ADMIT else None
        if admission is Admission.ADMIT and record is None:
            raise WrongAnswerError(f"{replica.member.replica_id}: {name} was admitted to nothing")
        self._judge(replica, name, record)

    def _judge(self, replica: Replica, name: str, answer: Record | None) -> None:
        self.num_answers += 1
        claim, history = self.claims[name], self.history[name]
        if answer is None:
            latest = _latest_without(history)
        else:
            if history.get(answer.serial) != answer:
                raise WrongAnswerError(f"{name} never was {answer}")
            latest = _latest_with(history, answer.serial)
        told = f"{name} on {replica.member.replica_id}: {latest}"
        if latest < claim:
            raise WrongAnswerError(f"{told}, though {claim} was everywhere")
        if answer is not None and latest < replica.answered.get(name, 0):
            raise WrongAnswerError(f"{told}, after {replica.answered[name]}")
        if answer is not None:
            replica.answered[name] = latest

    # ── operators ───────────────────────────────────────────────────────────────────────────

    def _plan(self) -> None:
        name, kind = self.random.choice(NAMES), self.random.randint(0, 5)
        self.num_made += 1
        replica = self._awake()
        # clocks of different machines disagree
        wish = Record(name=name, time=self.now + 50 * self.random.random())
        loaded = replace(wish, digest=f"{self.num_made:x}", source=f"/{self.num_made}")
        change = (
            plan.unloading(wish) if kind == 0
            else plan.resetting(wish) if kind == 1
            else plan.loading(loaded, load_inplace=kind != 2)
        )  # fmt: skip
        self.calls.append(Call(replica, change, name))

    def _load_modules(self) -> None:
        """A replica that has started sees to the names of its flag, as the server does."""
        replica = self._awake()
        if replica.has_modules or not replica.view.is_current:
            return
        replica.has_modules = True
        for name in NAMES:
            self.num_made += 1
            wish = Record(name=name, digest=f"{self.num_made:x}", source=f"/{self.num_made}")
            known = replica.view.last_record(name)
            if known is None or plan.is_open_to_modules(known):
                self.calls.append(Call(replica, plan.loading_module(wish), name, is_module=True))
            elif not known.is_module:
                self.calls.append(Call(replica, plan.naming_module(name), name, is_module=True))

    def _write(self) -> None:
        """Read and plan, or write what was planned."""
        waiting = [call for call in self.calls if call.written is None]
        if not waiting:
            return
        call = self.random.choice(waiting)
        if call.replica.is_cut or call.replica not in self.replicas:
            self.calls.remove(call)
            return
        if call.planned is None:
            current = self.store.get(call.name)
            try:
                call.planned = call.change(current)
            except _REFUSALS:
                self.calls.remove(call)
            call.expected = current.serial if current else 0
            return
        written = call.written = self.store.put(call.planned, call.expected)
        call.planned = None
        if written is None:
            return
        history = self.history[call.name]
        before = history[max(history)] if history else None
        try:
            if replace(call.change(before), serial=written.serial) != written:
                raise WrongAnswerError(f"{written} was planned on another than {before}")
        except _REFUSALS as error:
            raise WrongAnswerError(f"{written} follows {before}") from error
        is_gone = before is not None and before.is_unloaded
        if call.is_module and is_gone and self.was_named[call.name]:
            raise WrongAnswerError(f"{written} by --lora-modules, though {before} was unloaded")
        self.was_named[call.name] |= call.is_module
        history[written.serial] = written

    def _conclude(self) -> None:
        """See how far a change has come, and tell it if it is everywhere."""
        written = [call for call in self.calls if call.written is not None]
        if not written:
            return
        call = self.random.choice(written)
        assert call.written is not None, "it was chosen for that"
        rollout = rollout_of(call.written, self.store.standings())
        if rollout.is_everywhere:
            self._check_everywhere(call.written)
            self.claims[call.name] = max(self.claims[call.name], call.written.serial)
            self.num_claims += 1
        if rollout.is_everywhere or (rollout.is_settled and self.random.random() < 0.2):
            self.calls.remove(call)

    def _check_everywhere(self, written: Record) -> None:
        """Every process that is registered must have had it, or what came after it."""
        name = written.name
        registered = [standing.member for standing in self.store.standings()]
        for replica in self.replicas:
            had = _latest_with(self.history[name], replica.had.get(name, 0))
            if name not in replica.engine:
                had = max(had, _latest_without(self.history[name]))
            if replica.member in registered and had < written.serial:
                raise WrongAnswerError(f"{replica.member.replica_id} has no {written}")

    # ── faults ──────────────────────────────────────────────────────────────────────────────

    def _start(self, replica_id: str) -> None:
        self.num_made += 1
        member = Member(replica_id=replica_id, address="", incarnation=str(self.num_made))
        self.replicas.append(Replica(member, self.store))

    def _kill(self) -> None:
        """It is gone without a word; another process may come in its place at once."""
        if len(self.replicas) > 1:
            dead = self.random.choice(self.replicas)
            self.replicas.remove(dead)
            if self.random.random() < 0.7:
                self._start(dead.member.replica_id)

    def _late(self) -> None:
        free = {f"r{number}" for number in range(MAX_REPLICAS)}
        free -= {replica.member.replica_id for replica in self.replicas}
        if free:
            self._start(min(free))

    def _sleep(self) -> None:
        self._awake().asleep_until = self.now + 6 + 20 * self.random.random()

    def _cut(self) -> None:
        self.store.is_cut = not self.store.is_cut and self.random.random() < 0.2
        for replica in self.replicas:
            replica.is_cut = self.random.random() < 0.2

    def _lose_files(self) -> None:
        for replica in self.replicas:
            replica.has_files = self.random.random() < 0.8

    def _forget(self) -> None:
        """An operator forgets who is dead, or asleep, which looks the same."""
        awake = {one.member.replica_id for one in self.replicas if one.asleep_until <= self.now}
        for standing in self.store.standings():
            if standing.member.replica_id not in awake and standing.silent_seconds > 2:
                self.store.leave(standing.member.replica_id)

    # ── the end ─────────────────────────────────────────────────────────────────────────────

    def _heal(self) -> None:
        """Let all faults end, and see that every replica comes to have what the store says."""
        self.store.is_cut = False
        self.now += 100
        for replica in self.replicas:
            replica.is_cut, replica.has_files, replica.asleep_until = False, True, 0.0
        for _ in range(30):
            for replica in self.replicas:
                replica.keep(self.now)
                self._do(lambda replica=replica: replica.follow(9))  # type: ignore[misc]
                for name in [*replica.view.failed]:
                    replica.view.retry(name)
                replica.begin_work(9)
                for work in [*replica.under_way]:
                    replica.end_work(work)
                replica.view.check_invariants()
        records = {one.name: one for one in self.store.snapshot().records if not one.is_unloaded}
        for replica in self.replicas:
            has = {name: record.digest for name, record in replica.engine.items()}
            if has != {name: record.digest for name, record in records.items()}:
                raise WrongAnswerError(f"{replica.member.replica_id} has {has}, not {records}")
            for name in NAMES:
                self._judge(replica, name, replica.engine.get(name))


def _latest_with(history: dict[int, Record], serial: int) -> int:
    """The last serial up to which a name stands for the same as after this one."""
    first = history.get(serial)
    for later in sorted(each for each in history if first is not None and each > serial):
        if not history[later].stands_for_the_same(first):
            break
        serial = later
    return serial


def _latest_without(history: dict[int, Record]) -> int:
    """The last serial after which a name stood for nothing; 0 is before its first change."""
    return max((serial for serial, record in history.items() if record.is_unloaded), default=0)
