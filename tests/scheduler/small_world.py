"""A scheduler small enough to visit every state of it, and all that can happen to it.

The scheduler, the KV manager, the queue, the LoRA slots, the writers and the connector are the real
ones. What the world may do at any moment: a request arrives, in any order; any request is aborted;
KV is reset; an adapter's weights arrive, turn out to be lost, or are long on their way; a fetch
ends, well or badly; the scheduler is paused, with or without a drain, and resumed; a step runs, or,
where steps overlap, the next one is scheduled or the oldest one reported.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from types import MappingProxyType
from typing import ClassVar

from lora_serve.config import SchedulerConfig
from lora_serve.fuzz.oracle.places import PlaceWatch
from lora_serve.identity import (
    BASE_MODEL,
    EVERYTHING,
    AdapterRef,
    BlockHash,
    BlockHasher,
    CacheNamespace,
    Everything,
    NoAdapter,
)
from lora_serve.kv.connector import KVConnector
from lora_serve.kv.manager import KVCacheManager
from lora_serve.kv.tiered_connector import TieredConnector
from lora_serve.kv.writers import PendingWrites
from lora_serve.kv_groups import KVGroup, tokens_in_flight
from lora_serve.kv_tiers.base import TierNamespace
from lora_serve.sampling_params import SamplingParams
from lora_serve.scheduler.lora_slots import LoRASlots
from lora_serve.scheduler.pause import PauseState, SchedulerPause
from lora_serve.scheduler.queue import Slots, WaitingQueue
from lora_serve.scheduler.request import Request
from lora_serve.scheduler.scheduler import Scheduler
from lora_serve.step import ModelRunnerOutput, RequestStepOutput, SchedulerOutput
from tests.scheduler.small_store import HASHER, SmallStore, connector_over

BLOCK_SIZE = 2
DRAWN = 9  # the token that every draw gives

Happening = tuple[str, Callable[["World"], None]]


@dataclass(frozen=True)
class Asked:
    """A request that may arrive once."""

    adapter: AdapterRef | NoAdapter
    prompt: tuple[int, ...]
    max_tokens: int = 2
    ends_early: bool = False  # with its first token, which cannot be foreseen

    @cached_property
    def lora_name(self) -> str | NoAdapter:
        return BASE_MODEL if self.adapter is BASE_MODEL else self.adapter.name

    @cached_property
    def namespace(self) -> CacheNamespace:
        return CacheNamespace(b"m", self.adapter)

    @cached_property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens)

    @cached_property
    def chain(self) -> frozenset[BlockHash]:
        """All blocks that it can ever look for, or offer."""
        request = self.request("", 0)
        for _ in range(self.max_tokens):
            request.append(DRAWN)
        return frozenset(request.block_hashes)

    def request(self, request_id: str, arrival: int) -> Request:
        return Request(
            request_id=request_id,
            params=self.params,
            seed=0,
            max_tokens=self.max_tokens,
            eos_token_ids=(DRAWN,) if self.ends_early else (),
            namespace=self.namespace,
            hasher=HASHER,
            block_size=BLOCK_SIZE,
            sort_key=(0, arrival),
            token_ids=list(self.prompt),
            num_prompt_tokens=len(self.prompt),
            arrival_time=0.0,
            share="" if self.adapter is BASE_MODEL else self.adapter.name,
        )


@cache
def renewed(asked: Asked) -> Asked:
    """The same of the adapter's next generation, as who asks after a reset gets it."""
    assert asked.adapter is not BASE_MODEL, "the base model has no generation"
    return replace(asked, adapter=replace(asked.adapter, generation=asked.adapter.generation + 1))


class Memory:
    """Room for the weights of one adapter that no request runs on; loads take any time.

    resident, num_running: by digest, which all generations of a version share. slow: of what is
    loading, what gives its LoRA slot back; at most one at a time.
    """

    def __init__(self) -> None:
        self.resident: set[bytes] = set()
        self.loading: list[AdapterRef] = []
        self.slow: list[AdapterRef] = []
        self.num_running: dict[bytes, int] = {}

    def is_resident(self, ref: AdapterRef) -> bool:
        return ref.digest in self.resident

    def request_load(self, ref: AdapterRef) -> None:
        assert ref not in self.loading, "asked for twice"
        self.loading.append(ref)

    def end_load(self, ref: AdapterRef) -> None:
        self.loading.remove(ref)
        if ref in self.slow:
            self.slow.remove(ref)

    def finish_load(self, ref: AdapterRef) -> None:
        self.end_load(ref)
        in_use = {digest for digest in self.resident if self.num_running.get(digest)}
        self.resident = in_use | {ref.digest}

    def on_running(self, ref: AdapterRef) -> None:
        self.num_running[ref.digest] = self.num_running.get(ref.digest, 0) + 1

    def on_idle(self, ref: AdapterRef) -> None:
        self.num_running[ref.digest] -= 1


class World:
    """A scheduler and all that can happen to it.

    left_to_ask: indices into asked, which name the requests. resets: what KV may be reset: that of
    an adapter once, because its next generation begins then; EVERYTHING again and again.
    num_pauses: how many may yet be begun. served: what shares have got before it begins.
    """

    def __init__(
        self,
        asked: Sequence[Asked],
        *,
        num_blocks: int,
        max_num_seqs: int = 2,
        budget: int = 3,
        fair_share: str = "none",
        is_overlapped: bool = False,
        resets: Sequence[str | Everything] = (),
        has_tiers: bool = False,
        failure_policy: str = "recompute",
        max_fetched_blocks: int = 2,
        connector_class: type[TieredConnector[Request]] = TieredConnector,
        slots_class: type[LoRASlots] = LoRASlots,
        writers_class: type[PendingWrites[Request]] = PendingWrites,
        queue_class: type[WaitingQueue] = WaitingQueue,
        groups: Sequence[KVGroup] = (KVGroup(),),
        num_pauses: int = 0,
        pause_class: type[SchedulerPause] = SchedulerPause,
        scheduler_class: type[Scheduler] = Scheduler,
        served: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, fair_share=fair_share
        )
        self.memory = Memory()
        in_flight = tokens_in_flight(
            tuple(groups),
            BLOCK_SIZE,
            num_blocks=num_blocks,
            max_model_len=max(len(each.prompt) + each.max_tokens for each in asked),
            wanted=(1 + is_overlapped) * budget,
            least=1 + is_overlapped,
        )
        self.kv = KVCacheManager(num_blocks, BLOCK_SIZE, True, groups, in_flight)
        self.store = SmallStore() if has_tiers else None
        self.connector: KVConnector[Request] = KVConnector()
        if self.store is not None:
            self.connector = connector_over(
                self.store,
                failure_policy=failure_policy,
                max_fetched_blocks=max_fetched_blocks,
                connector_class=connector_class,
            )
        self.scheduler = scheduler = scheduler_class(
            config, 1, self.kv, self.memory, self.connector
        )
        self.places = PlaceWatch()
        slots: Slots = {}
        if queue_class is not WaitingQueue:
            scheduler._queue = queue_class(slots)
        scheduler._queue._slots = slots
        scheduler._slots = slots_class(1, slots, scheduler._queue, self.memory)
        scheduler._shared.writers = writers_class()
        scheduler._pause = pause_class()
        if scheduler._queue._shares is not None:
            scheduler._queue._shares._served.update(served)
        self.is_overlapped = is_overlapped
        self.in_flight: deque[SchedulerOutput] = deque()
        self.asked = tuple(asked)
        self.left_to_ask = list(range(len(asked)))
        self.resets = tuple(resets)
        self.num_arrived = 0
        self.num_pauses = num_pauses

    @property
    def is_paused(self) -> bool:
        return self.scheduler._pause.state is not PauseState.NONE

    @property
    def requests(self) -> list[Request]:
        """Oldest first."""
        return list(self.scheduler._requests.values())

    def asked_of(self, request: Request) -> Asked:
        return self.asked[int(request.request_id)]

    def happenings(self) -> Iterator[Happening]:
        """Everything that can happen now; each is done to a copy of this world."""
        yield from self.steps()
        yield from self.endings()
        yield from self.disturbances()

    def steps(self) -> Iterator[Happening]:
        """What the engine does by itself, over and over."""
        if not self.is_overlapped:
            yield "step", World.step
        if self.is_overlapped and len(self.in_flight) < 2:
            yield "plan", World.plan
        if self.in_flight:
            yield "report", World.report

    def endings(self) -> Iterator[Happening]:
        """How what was begun elsewhere may end; in one of these ways it does.

        A pause ends once it has come to rest.
        """
        if self.scheduler.is_at_rest:
            yield "resume", lambda world: world.scheduler.resume()
        for ref in self.memory.loading:
            yield f"{ref.name} is loaded", lambda world, ref=ref: world.finish_load(ref)
            yield f"{ref.name} is lost", lambda world, ref=ref: world.lose(ref)
            if not self.memory.slow:
                yield f"{ref.name} is slow", lambda world, ref=ref: world.slow_down(ref)
        if self.store is None:
            return
        for ticket, num_blocks in self.store.asked.items():
            for count in range(num_blocks + 1):
                yield (
                    f"fetch {ticket} gives {count}",
                    lambda world, ticket=ticket, count=count: world.store.give(ticket, count),
                )
            yield f"fetch {ticket} fails", lambda world, ticket=ticket: world.store.fail(ticket)
            yield f"fetch {ticket} hangs", lambda world, ticket=ticket: world.store.hang(ticket)

    def disturbances(self) -> Iterator[Happening]:
        """What may happen or not."""
        for number in self.left_to_ask:
            yield f"ask {number}", lambda world, number=number: world.ask(number)
        for request in self.requests:
            name = request.request_id
            yield f"abort {name}", lambda world, name=name: world.abort(name)
        for scope in self.resets:
            yield f"reset {scope}", lambda world, scope=scope: world.reset(scope)
        if self.num_pauses:
            yield "pause", lambda world: world.pause(drains=False)
            yield "drain", lambda world: world.pause(drains=True)
        if self.is_paused:
            yield "resume", lambda world: world.scheduler.resume()
        if self.store is not None and self.store.cancelled is not None:
            yield "late result", lambda world: world.store.give_late()

    def ask(self, number: int) -> None:
        self.left_to_ask.remove(number)
        self.num_arrived += 1
        self.scheduler.add(self.asked[number].request(str(number), self.num_arrived))

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    def reset(self, lora_name: str | Everything) -> None:
        if lora_name is not EVERYTHING:
            self.resets = tuple(name for name in self.resets if name != lora_name)
            self.asked = tuple(
                renewed(asked)
                if number in self.left_to_ask and asked.lora_name == lora_name
                else asked
                for number, asked in enumerate(self.asked)
            )
        self.scheduler.reset_prefix_cache(lora_name)
        self.scheduler.check_invariants()

    def pause(self, *, drains: bool) -> None:
        self.num_pauses -= 1
        self.scheduler.pause(drains=drains)

    def finish_load(self, ref: AdapterRef) -> None:
        self.memory.finish_load(ref)
        self.scheduler.adapter_loaded(ref)

    def slow_down(self, ref: AdapterRef) -> None:
        self.memory.slow.append(ref)
        self.scheduler.adapter_is_slow(ref)

    def lose(self, ref: AdapterRef) -> None:
        self.memory.end_load(ref)
        self.scheduler.adapter_failed(ref)

    def step(self) -> None:
        """Schedule a step and report it, as the engine does where steps do not overlap."""
        self.plan()
        if self.in_flight:
            self.report()

    def plan(self) -> None:
        places = self.places.look(self.scheduler)
        self.scheduler.take_in_fetches()
        step = self.scheduler.schedule()
        self.places.check(self.scheduler, places)
        if step.requests:
            self.in_flight.append(step)
        self.scheduler.check_invariants()

    def report(self) -> None:
        step = self.in_flight.popleft()
        outputs = tuple(
            RequestStepOutput((DRAWN,) * len(request.asked.samples)) for request in step.requests
        )
        self.scheduler.update_from_output(ModelRunnerOutput(step.step_id, outputs))
        self.scheduler.check_invariants()


class _Pickler(pickle.Pickler):
    """Copies through bytes take a fraction of deepcopy's time, if what never changes stays out."""

    dispatch_table: ClassVar = copyreg.dispatch_table | {
        never_changes: lambda thing: (_constant, (_number_of(thing),))
        for never_changes in (
            AdapterRef, Asked, BlockHasher, CacheNamespace, SamplingParams, SchedulerConfig,
            TierNamespace,
        )
    }  # fmt: skip


_constants: dict[int, object] = {}  # by id, which is theirs while they are here


def _number_of(thing: object) -> int:
    _constants[id(thing)] = thing
    return id(thing)


def _constant(number: int) -> object:
    return _constants[number]


def frozen(world: World) -> bytes:
    """The world as it is now; `thawed` makes a copy of it, as often as wanted."""
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(world)
    return file.getvalue()


def thawed(world: bytes) -> World:
    copy = pickle.loads(world)
    assert isinstance(copy, World), "frozen"
    return copy
