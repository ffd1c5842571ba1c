"""The journal beside a real engine core: after any calls, in any order of replies, they agree."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from random import Random

import pytest

from lora_serve.engine.frontend.adapter_journal import AdapterJournal
from lora_serve.fuzz.oracle.engine import OracleEngine
from lora_serve.fuzz.oracle.tier_store import OracleTierStore
from lora_serve.identity import EVERYTHING, Everything
from lora_serve.kv_tiers.base import Drop
from lora_serve.kv_tiers.forgetting import Forgetting
from lora_serve.messages import (
    AdapterInfo,
    CallReply,
    EngineMessage,
    LoadAdapter,
    ResetPrefixCache,
    RestoreAdapters,
    UnloadAdapter,
)

FILES = {"/one": "one", "/two": "two", "/same as one": "one"}
NAMES = ("a", "b")

Call = Callable[[int], EngineMessage]


class LateStore(OracleTierStore):
    """Forgets when it is told to go on; until then every drop waits."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Forgetting] = []

    def drop(self, drop: Drop) -> Forgetting:
        forgetting = Forgetting(("disk",))
        self.waiting.append(forgetting)
        return forgetting

    def go_on(self, *, fails: bool = False) -> None:
        for forgetting in self.waiting:
            if fails:
                forgetting.failed("disk", "it is full")
            else:
                forgetting.confirm("disk")
        self.waiting.clear()


class World:
    """An engine core, its journal, and calls that are answered in the engine's own time."""

    def __init__(self, load_delay: int, *, holds_drops: bool) -> None:
        self.journal = AdapterJournal()
        self.store = LateStore()
        self.holds_drops = holds_drops
        self._load_delay = load_delay
        self._num_calls = 0
        self._start()

    def call(self, message_for: Call) -> None:
        self._num_calls += 1
        message = message_for(self._num_calls)
        self.journal.note_call(self._num_calls, message)
        self.engine.core.handle(message)
        if not self.holds_drops:
            self.store.go_on()
        self.step()

    def step(self) -> None:
        self.engine.step()
        for reply in self.engine.calls.values():
            self.journal.note_reply(reply)
        self.engine.calls.clear()
        self.check()

    def end_calls(self, *, fails: bool = False) -> None:
        """Have all calls answered, with drops that succeed or fail."""
        self.store.go_on(fails=fails)
        for _ in range(3 * (self._load_delay + 2)):  # three loads of one name follow each other
            self.step()
        assert not self.journal._asked, "a call was not answered"

    def restart(self) -> None:
        """The engine dies with what it has not answered."""
        self.journal.note_death()
        self.store.waiting.clear()
        self._start()
        self.engine.core.handle(self.journal.restore_message())
        self.check()

    def infos(self) -> dict[str, AdapterInfo]:
        return {info.name: info for info in self.engine.core.adapters.infos()}

    def check(self) -> None:
        """The journal has the engine's adapters; generations only once a reset is answered."""
        restored = {info.name: info for info in self.journal.restore_message().adapters}
        has_pending_resets = bool(self.store.waiting)
        engine = self.infos()
        assert restored.keys() == engine.keys()
        for name, info in engine.items():
            mine = restored[name]
            assert (mine.path, mine.digest, mine.pinned) == (info.path, info.digest, info.pinned)
            assert mine.generation <= info.generation
            assert mine.generation == info.generation or has_pending_resets

    def _start(self) -> None:
        self.engine = OracleEngine(store=self.store, load_delay=self._load_delay)
        self.engine.loader.files |= FILES


def load(name: str, path: str, *, inplace: bool = True, pinned: bool = False) -> Call:
    return lambda call_id: LoadAdapter(call_id, name, path, inplace, pinned)


def unload(name: str) -> Call:
    return lambda call_id: UnloadAdapter(call_id, name)


def reset(name: str | Everything) -> Call:
    return lambda call_id: ResetPrefixCache(call_id, name)


CALLS = {
    "load": load("a", "/one", inplace=False),
    "load in place": load("a", "/two"),
    "load the same bytes": load("a", "/same as one", pinned=True),
    "fail to load": load("a", "/nowhere"),
    "unload": unload("a"),
    "reset": reset("a"),
    "reset all": reset(EVERYTHING),
}
TRIPLES = [names for length in (2, 3) for names in product(CALLS, repeat=length)]


@pytest.mark.parametrize(
    ("load_delay", "holds_drops"),
    [
        (0, True),
        (2, False),
        *(pytest.param(*c, marks=pytest.mark.slow) for c in [(0, False), (2, True)]),
    ],
)
def test_any_three_calls_at_once_leave_journal_and_engine_agreed(
    load_delay: int, holds_drops: bool
) -> None:
    for names, fails in product(TRIPLES, [False, True]):
        world = World(load_delay, holds_drops=holds_drops)
        world.call(load("a", "/one"))
        world.end_calls()
        for name in names:
            world.call(CALLS[name])
        world.end_calls(fails=fails)
        world.restart()


@pytest.mark.parametrize("load_delay", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_any_three_calls_around_a_death_leave_journal_and_engine_agreed(load_delay: int) -> None:
    for names, place in product(TRIPLES, range(3)):
        world = World(load_delay, holds_drops=True)
        world.call(load("a", "/one"))
        world.end_calls()
        for index, name in enumerate(names):
            world.call(CALLS[name])
            if index == place:
                world.restart()
        world.end_calls()


@pytest.mark.parametrize("seed", range(60))
def test_long_lives_with_deaths_in_between_leave_journal_and_engine_agreed(seed: int) -> None:
    rng = Random(seed)
    world = World(rng.randrange(3), holds_drops=True)

    def call() -> None:
        world.call(random_call(rng))

    def end_calls() -> None:
        world.end_calls(fails=rng.random() < 0.5)

    for _ in range(60):
        rng.choice([call, call, call, world.step, end_calls, world.restart])()


def random_call(rng: Random) -> Call:
    name = rng.choice(NAMES)
    return rng.choice(
        [
            load(name, rng.choice([*FILES, "/nowhere"]), inplace=rng.random() < 0.7),
            unload(name),
            reset(name),
            reset(EVERYTHING),
        ]
    )


def test_a_generation_outlives_its_name_and_meets_it_again() -> None:
    world = World(0, holds_drops=True)
    world.call(load("a", "/one"))
    world.call(reset("a"))
    world.call(unload("a"))
    world.end_calls()
    assert world.journal.restore_message() == RestoreAdapters((), {"a": 1})
    world.restart()
    world.call(load("a", "/one"))
    assert world.infos()["a"].generation == 1


def test_a_reset_that_a_tier_has_not_confirmed_has_raised_the_generation_all_the_same() -> None:
    world = World(0, holds_drops=True)
    world.call(load("a", "/one"))
    world.call(reset("a"))
    world.end_calls(fails=True)
    assert world.journal.restore_message().generations == {"a": 1}


def test_a_reply_that_says_less_than_it_should_changes_nothing() -> None:
    journal = AdapterJournal()
    for call_id, call in enumerate(CALLS.values()):
        journal.note_call(call_id, call(call_id))
        journal.note_reply(CallReply(call_id))
        journal.note_reply(CallReply(call_id))  # and again, of a call that is over
    assert journal.restore_message() == RestoreAdapters((), {})
