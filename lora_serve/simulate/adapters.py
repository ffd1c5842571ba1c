"""Adapters without files: a version of a name is a path, and that is also its digest.

The lanes, deadlines and order of reads are the real loader's; a read takes the cost file's time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.adapters.loader import AdapterLoader
from lora_serve.adapters.location import RemoteAdapter
from lora_serve.adapters.source import AdapterSource
from lora_serve.adapters.threads import Work
from lora_serve.config import LoRAConfig
from lora_serve.identity import AdapterRef, NoAdapter
from lora_serve.messages import AdapterInfo
from lora_serve.simulate.cores import Cores
from lora_serve.simulate.costs import Costs
from lora_serve.simulate.events import EventQueue
from lora_serve.simulate.executor import ReplicaClock

RANK = 8  # stands where a rank is told; nothing depends on it


def path_of(name: str, version: int) -> str:
    return f"{name}@{version}"


def name_of(digest: bytes) -> str:
    return digest.decode().rpartition("@")[0]


def version_of(adapter: AdapterRef | NoAdapter) -> int:
    """Which version answers; 0 for the base model, which has no other."""
    if isinstance(adapter, NoAdapter):
        return 0
    return int(adapter.digest.decode().rpartition("@")[2])


def checkpoint_at(path: str) -> AdapterCheckpoint:
    return AdapterCheckpoint(path, path.encode(), RANK, 0, "", ())


def registered(name: str, version: int) -> AdapterInfo:
    """What a replica knows of an adapter that it has never read."""
    path = path_of(name, version)
    return AdapterInfo(
        name=name,
        path=path,
        digest=path.encode().hex(),
        generation=0,
        rank=RANK,
        num_bytes=0,
        residency="evicted",
        pinned=False,
        num_leases=0,
        created=0.0,
    )


class SimulatedThreads:
    """`LoaderThreads` in virtual time: reads beside each other, preparations one by one.

    All of them want a core, which steps may have taken.
    """

    def __init__(self, costs: Costs, cores: Cores, events: EventQueue, clock: ReplicaClock) -> None:
        self._costs = costs
        self._cores = cores
        self._events = events
        self._clock = clock
        self._preparing = cores.worker()

    def start_read(self, work: Work) -> None:
        read = partial(self._cores.worker().do, self._costs.adapter_read_seconds, work)
        self._events.at(self._clock.now, read)

    def prepare(self, work: Work) -> None:
        self._preparing.do(self._costs.adapter_prepare_seconds, work)

    def close(self) -> None:
        """There is no thread to end."""


def make_loader(
    config: LoRAConfig,
    costs: Costs,
    cores: Cores,
    events: EventQueue,
    clock: ReplicaClock,
    notify: Callable[[], None],
) -> AdapterLoader:
    threads = SimulatedThreads(costs, cores, events, clock)
    source = AdapterSource(checkpoint_at, _download, lambda copy: checkpoint_at(copy.directory))
    return AdapterLoader(config, source, lambda checkpoint: None, notify, threads, clock)


def _download(adapter: RemoteAdapter) -> str:
    raise NotImplementedError("no adapter of a simulation lies on the hub")
