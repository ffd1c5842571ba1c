"""A scheduler small enough to visit every state of it, and all that can happen to it.

The scheduler, the KV manager, the queue, the seats and the writers are the real ones. What the
world may do at any moment: a request arrives, in any order; any request is aborted; an adapter's
weights arrive or turn out to be lost; a step runs, or, where steps overlap, the next one is
planned or the oldest one reported.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from lora_serve.config import SchedulerConfig
from lora_serve.identity import AdapterRef, BlockHash, BlockHasher, CacheNamespace
from lora_serve.kv.connector import KVConnector
from lora_serve.kv.manager import KVCacheManager
from lora_serve.kv.writers import PendingWrites
from lora_serve.sampling_params import SamplingParams
from lora_serve.scheduler.queue import WaitingQueue
from lora_serve.scheduler.request import Request
from lora_serve.scheduler.scheduler import Scheduler
from lora_serve.scheduler.seats import AdapterSeats
from lora_serve.step import ModelRunnerOutput, RequestStepOutput, SchedulerOutput

BLOCK_SIZE = 2
DRAWN = 9  # the token that every draw gives
HASHER = BlockHasher("xxh3_128")


@dataclass(frozen=True)
class Asked:
    """A request that may arrive once."""

    adapter: AdapterRef | None
    prompt: tuple[int, ...]
    max_tokens: int = 2
    ends_early: bool = False  # with its first token, which nobody foresees

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
            share=self.adapter.name if self.adapter else "",
        )


class Memory:
    """Room for the weights of one adapter that nobody runs on; loads take as long as they like."""

    def __init__(self) -> None:
        self.resident: set[AdapterRef] = set()
        self.loading: list[AdapterRef] = []
        self.num_running: dict[AdapterRef, int] = {}

    def is_resident(self, ref: AdapterRef) -> bool:
        return ref in self.resident

    def request_load(self, ref: AdapterRef) -> None:
        assert ref not in self.loading, "asked for twice"
        self.loading.append(ref)

    def finish_load(self, ref: AdapterRef) -> None:
        self.loading.remove(ref)
        self.resident = {r for r in self.resident if self.num_running.get(r)} | {ref}

    def on_running(self, ref: AdapterRef) -> None:
        self.num_running[ref] = self.num_running.get(ref, 0) + 1

    def on_idle(self, ref: AdapterRef) -> None:
        self.num_running[ref] -= 1


class World:
    """A scheduler and all that can happen to it.

    left_to_ask: indices into asked, which name the requests. kinds: which of asked is the first
    that is equal to each.
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
        seats_class: type[AdapterSeats] = AdapterSeats,
        writers_class: type[PendingWrites[Request]] = PendingWrites,
        queue_class: type[WaitingQueue] = WaitingQueue,
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, fair_share=fair_share
        )
        self.memory = Memory()
        self.kv = KVCacheManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=True)
        self.scheduler = scheduler = Scheduler(config, 1, self.kv, self.memory, KVConnector())
        if queue_class is not WaitingQueue:
            scheduler._queue = queue_class()
        scheduler._seats = seats_class(1, scheduler._queue, self.memory)
        scheduler._writers = writers_class()
        self.is_overlapped = is_overlapped
        self.in_flight: deque[SchedulerOutput] = deque()
        self.asked = tuple(asked)
        self.kinds = tuple(map(asked.index, asked))
        self.left_to_ask = list(range(len(asked)))
        self.num_arrived = 0

    @property
    def requests(self) -> list[Request]:
        """Oldest first."""
        return list(self.scheduler._requests.values())

    def happenings(self) -> Iterator[tuple[str, Callable[[World], None]]]:
        """Everything that can happen now; each is done to a copy of this world."""
        if not self.is_overlapped:
            yield "step", World.step
        if self.is_overlapped and len(self.in_flight) < 2:
            yield "plan", World.plan
        if self.in_flight:
            yield "report", World.report
        for number in self.left_to_ask:
            yield f"ask {number}", lambda world, number=number: world.ask(number)
        for request in self.requests:
            name = request.request_id
            yield f"abort {name}", lambda world, name=name: world.abort(name)
        for ref in self.memory.loading:
            yield f"{ref.name} is loaded", lambda world, ref=ref: world.finish_load(ref)
            yield f"{ref.name} is lost", lambda world, ref=ref: world.lose(ref)

    def ask(self, number: int) -> None:
        self.left_to_ask.remove(number)
        self.num_arrived += 1
        self.scheduler.add(self.asked[number].request(str(number), self.num_arrived))

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    def finish_load(self, ref: AdapterRef) -> None:
        self.memory.finish_load(ref)
        self.scheduler.adapter_loaded(ref)

    def lose(self, ref: AdapterRef) -> None:
        self.memory.loading.remove(ref)
        self.scheduler.adapter_failed(ref)

    def step(self) -> None:
        """As the engine does it: report what was planned, or else what was planned before."""
        num_in_flight = len(self.in_flight)
        if num_in_flight < 2:
            self.plan()
        is_first = self.is_overlapped and num_in_flight == 0
        if self.in_flight and not is_first:
            self.report()

    def plan(self) -> None:
        step = self.scheduler.schedule()
        if step.requests:
            self.in_flight.append(step)
        self.scheduler.check_invariants()

    def report(self) -> None:
        step = self.in_flight.popleft()
        outputs = tuple(
            RequestStepOutput(DRAWN if request.sample else None) for request in step.requests
        )
        self.scheduler.update_from_output(ModelRunnerOutput(step.step_id, outputs))
        self.scheduler.check_invariants()

    def go_on(self) -> None:
        """What happens when nobody comes or leaves: loads end, and a step runs."""
        for ref in sorted(self.memory.loading, key=lambda ref: ref.name):
            self.finish_load(ref)
        self.step()


class _Pickler(pickle.Pickler):
    """Copies through bytes take a fraction of deepcopy's time, if what never changes stays out."""

    dispatch_table: ClassVar = copyreg.dispatch_table | {
        never_changes: lambda thing: (_constant, (_number_of(thing),))
        for never_changes in (
            AdapterRef, Asked, BlockHasher, CacheNamespace, SamplingParams, SchedulerConfig,
        )
    }  # fmt: skip


_constants: dict[int, object] = {}  # by id, which nobody else gets while they are here


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
