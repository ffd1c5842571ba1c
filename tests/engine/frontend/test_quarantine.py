"""Killers are found among innocents, over an engine that is a few lines of arithmetic."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from lora_serve.engine.frontend.quarantine import PATIENCE_SECONDS, Quarantine
from lora_serve.engine.frontend.request_states import LOST_TOKENS, RequestState, RequestStates
from lora_serve.errors import EngineDeadError, RequestFailedError
from lora_serve.generate_request import GenerateRequest
from lora_serve.messages import EngineRequest
from lora_serve.outputs import OutputDelta
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams

DEATH = EngineDeadError("the engine process has died")


def state_of(name: str, *, n: int = 1, is_streamed: bool = False) -> RequestState:
    params = SamplingParams(max_tokens=99, seed=0, n=n)
    request = GenerateRequest(
        request_id=name, prompt=TokensPrompt((1,)), params=params, is_streamed=is_streamed
    )
    return RequestState(EngineRequest(request), max_backlog=1000)


def error_of(state: RequestState) -> object:
    assert state.is_over
    return state._deltas.items.popleft()


@dataclass
class World:
    """Engines that make one token a step of each state sent.

    kills_at: tokens of a killer at which its engine dies. seconds_per_step: on its clock.
    """

    kills_at: dict[str, int] = field(default_factory=dict)
    seconds_per_step: float = 0.0
    now: float = 0.0
    num_deaths: int = 0

    def __post_init__(self) -> None:
        self.states, self.quarantine = RequestStates(), Quarantine(lambda: self.now)
        self.by_name: dict[str, RequestState] = {}
        self.sampled: dict[str, int] = {}  # by the engine of this moment
        self.unheard: deque[dict[str, bool]] = deque()  # steps: whose token, and if it is the last
        self.sent_at_death: list[set[str]] = []

    def come(self, name: str, *, n: int = 1) -> RequestState:
        state = self.by_name[name] = state_of(name, n=n)
        self.states.add(state)
        self.quarantine.add(state)
        self.advance()
        return state

    def advance(self) -> None:
        while (state := self.quarantine.next_to_send()) is not None:
            assert not state.is_sent, "sent twice"
            state.is_sent = True

    def sent(self) -> set[str]:
        return {name for name, state in self.by_name.items() if state.is_sent and not state.is_over}

    def step(self, lengths: dict[str, int], num_unheard: int = 0) -> None:
        """Give each request one token; or die, and with it the last steps' replies are lost."""
        self.now += self.seconds_per_step
        sent = self.sent()
        if any(self.kills_at.get(name) == self.sampled.get(name, 0) for name in sent):
            return self.die()
        self.sampled.update((name, self.sampled.get(name, 0) + 1) for name in sent)
        self.unheard.append({name: self.sampled[name] >= lengths[name] for name in sent})
        while len(self.unheard) > num_unheard:
            for name, is_last in self.unheard.popleft().items():
                if name in self.sent():
                    self.tell(name, "length" if is_last else None)
        return self.advance()

    def tell(self, name: str, reason: str | None) -> None:
        state = self.by_name[name]
        for index in range(state.num_choices):
            state.put(OutputDelta(index, "x", (1,), finish_reason=reason))

    def die(self) -> None:
        self.num_deaths += 1
        self.sent_at_death.append(self.sent())
        self.sampled.clear()
        self.unheard.clear()
        self.quarantine.engine_died(DEATH, self.states)
        self.quarantine.engine_is_back()
        self.advance()

    def run(self, lengths: dict[str, int], num_unheard: int = 0) -> None:
        """Until everything is over. The first engine takes some of its last words with it."""
        for _ in range(10_000):
            if all(state.is_over for state in self.by_name.values()):
                return
            self.step(lengths, num_unheard if self.num_deaths == 0 else 0)
        raise AssertionError(f"{self.sent()} never end")

    def refused(self) -> set[str]:
        return {
            name
            for name, state in self.by_name.items()
            if isinstance(error_of(state), RequestFailedError)
        }


LENGTHS = st.lists(st.integers(1, 12), min_size=2, max_size=9)


@settings(max_examples=300, deadline=None)
@given(LENGTHS, st.data())
def test_a_second_death_names_the_killer_alone(lengths: list[int], data: st.DataObject) -> None:
    names = [f"r{i}" for i in range(len(lengths))]
    killer = data.draw(st.sampled_from(names))
    kills_at = data.draw(st.integers(0, lengths[names.index(killer)] - 1))
    num_unheard = data.draw(st.integers(0, LOST_TOKENS))
    world = World({killer: kills_at})
    for name in names:
        world.come(name, n=data.draw(st.integers(1, 2)))
        if data.draw(st.booleans()):
            world.step(dict(zip(names, lengths, strict=True)), num_unheard)
    world.run(dict(zip(names, lengths, strict=True)), num_unheard)
    assert world.refused() == {killer}
    assert world.num_deaths == 2


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.sets(st.integers(0, 8), min_size=1))
def test_each_further_killer_costs_one_more_engine(lengths: list[int], which: set[int]) -> None:
    names = [f"r{i}" for i in range(len(lengths))]
    killers = {names[i % len(names)] for i in which}
    world = World(dict.fromkeys(killers, 0))
    for name in names:
        world.come(name)
    world.run(dict(zip(names, lengths, strict=True)))
    assert world.refused() == killers
    assert world.num_deaths == 1 + len(killers)


def test_quarantined_requests_are_probed_alone_and_go_on_beside_the_next() -> None:
    world = World()
    for name in "abc":
        world.come(name)
    world.die()
    lengths = dict.fromkeys("abcd", 50)
    world.come("d")
    assert world.sent() == {"a"}
    for _ in range(LOST_TOKENS + 1):
        world.step(lengths)
    assert world.sent() == {"a", "b"}
    for _ in range(LOST_TOKENS + 1):
        world.step(lengths)
    assert world.sent() == {"a", "b", "c"}
    for _ in range(LOST_TOKENS + 1):
        world.step(lengths)
    assert world.sent() == {"a", "b", "c", "d"}, "d came since, and is sent when all are cleared"


def test_a_killer_that_came_since_waits_and_harms_no_quarantined_request() -> None:
    world = World({"late": 0})
    for name in "abc":
        world.come(name)
    world.die()
    world.come("late")
    world.run({"a": 99, "b": 99, "c": 99, "late": 99})
    assert world.refused() == {"late"}
    assert world.sent_at_death[1] == {"a", "b", "c", "late"}, "it is sent when they are cleared"
    assert world.num_deaths == 3


def test_the_shortest_probe_comes_first() -> None:
    world = World()
    world.come("long")
    for _ in range(20):
        world.step({"long": 99})
    world.come("short")
    world.die()
    assert world.sent() == {"short"}


def test_a_long_probe_does_not_hold_the_others_for_ever() -> None:
    world = World(seconds_per_step=1.0)
    lengths = {"one": 99, "two": 99, "new": 99}
    world.come("one")
    world.come("two")
    for _ in range(50):
        world.step(lengths)
    world.die()
    world.come("new")
    while world.now < 50 + PATIENCE_SECONDS:
        assert world.sent() == {"one"}
        world.step(lengths)
    assert world.sent() == {"one", "two", "new"}


def test_a_request_that_was_about_to_be_sent_at_a_death_is_quarantined_once() -> None:
    world = World()
    for name in "abc":
        world.come(name)
    world.die()
    world.come("d")
    world.now += PATIENCE_SECONDS
    b = world.quarantine.next_to_send()
    assert b is world.by_name["b"]
    b.is_sent = True
    world.die()
    assert world.sent() == {"a"}
    world.now += PATIENCE_SECONDS
    world.advance()
    assert world.sent() == {"a", "c", "d"}, "b saw two deaths, and waits for its probe"
    world.run(dict.fromkeys("abcd", 99))
    assert world.refused() == set()


def test_a_killer_whose_probe_is_long_is_found_at_its_third_death() -> None:
    world = World({"killer": 40}, seconds_per_step=1.0)
    lengths = dict.fromkeys(["killer", "other", "third", "new"], 99)
    for name in ("other", "killer", "third"):
        world.come(name)
    for _ in range(41):
        world.step(lengths)
    assert world.num_deaths == 1
    world.come("new")
    world.run(lengths)
    assert world.refused() == {"killer"}
    assert world.num_deaths == 3


def test_newcomers_beside_a_long_probe_leave_its_end_open_once() -> None:
    """A death that one of them may have caused names none; they are quarantined then."""
    world = World({"new": 3}, seconds_per_step=PATIENCE_SECONDS / 5)
    lengths = {"innocent": 60, "new": 60}
    world.come("innocent")
    for _ in range(30):
        world.step(lengths)
    world.die()
    world.come("new")
    world.run(lengths)
    assert world.refused() == {"new"}


def test_a_caller_who_leaves_in_the_middle_of_a_probe_makes_room_for_the_next() -> None:
    world = World()
    states = [world.come(name) for name in "abcd"]
    world.die()
    world.states.remove(states[0])  # probed
    world.states.remove(states[1])  # waiting for it
    world.advance()
    assert world.sent() == {"c"}


def test_a_stream_that_has_begun_in_its_probe_ends_with_its_killers_name() -> None:
    world = World()
    state = state_of("s", is_streamed=True)
    world.by_name["s"] = state
    world.states.add(state)
    world.quarantine.add(state)
    world.advance()
    world.die()
    state.has_begun = True
    world.die()
    assert isinstance(error_of(state), RequestFailedError)


def test_a_choice_that_is_finished_needs_no_further_proof() -> None:
    world, lengths = World(), {"two": 99, "next": 99}
    world.come("next")
    for _ in range(10):
        world.step(lengths)
    state = world.come("two", n=2)
    for _ in range(5):
        world.step(lengths)
    world.die()
    for _ in range(5):
        state.put(OutputDelta(0, "x", (1,)))
    state.put(OutputDelta(0, "x", (1,), finish_reason="stop"))  # where it also ended before
    for _ in range(5 + LOST_TOKENS):
        state.put(OutputDelta(1, "x", (1,)))
    world.advance()
    assert world.sent() == {"two"}, "the other choice has not come far enough"
    state.put(OutputDelta(1, "x", (1,)))
    world.advance()
    assert world.sent() == {"two", "next"}


def test_a_death_that_was_got_past_does_not_count_any_more() -> None:
    world, lengths = World(), {"a": 99}
    state = world.come("a")
    for _ in range(5):
        for _ in range(state.num_tokens_at_death + LOST_TOKENS + 1):
            world.step(lengths)
        world.die()
        assert state.num_deaths == 1
