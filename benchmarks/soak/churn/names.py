"""What the engine's thread pays for a name, with so many names registered. No server, no files.

To look it up is to lease what it stands for and to give that back; to publish is to let it stand
for other bytes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import NoReturn

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.adapters.loader import AdapterLoader
from lora_serve.adapters.manager import AdapterManager
from lora_serve.adapters.source import AdapterSource
from lora_serve.adapters.threads import AdapterThreads
from lora_serve.config import LoRAConfig

NUM_RESIDENT = 64
NUM_ROUNDS, ROUND = 50, 100  # the median of so many rounds of so many operations


@dataclass(frozen=True, slots=True, kw_only=True)
class NameCosts:
    """Microseconds of one operation, with so many names registered."""

    num_names: int
    lookup_us: float
    publish_us: float


def name_costs(num_names: int) -> NameCosts:
    config = LoRAConfig(enable_lora=True, max_cpu_loras=NUM_RESIDENT)
    source = AdapterSource(_not_read, _not_read, _not_read)
    loader = AdapterLoader(config, source, _not_read, lambda: None, AdapterThreads())
    manager, rng = AdapterManager(config, loader), Random(num_names)
    numbers = iter(range(10**9))

    def publish(name: str) -> None:
        digest = next(numbers).to_bytes(32, "big")
        checkpoint = AdapterCheckpoint(f"/adapters/{name}", digest, 16, 1_000_000, "", ())
        manager.publish(name, checkpoint, load_inplace=True)
        manager.take_changes()

    names = [f"adapter-{number}" for number in range(num_names)]
    for name in names:
        publish(name)
    costs = NameCosts(
        num_names=num_names,
        lookup_us=_microseconds(lambda: manager.release(manager.acquire(rng.choice(names)))),
        publish_us=_microseconds(lambda: publish(rng.choice(names))),
    )
    manager.close()
    return costs


def _not_read(what: object) -> NoReturn:
    raise AssertionError(f"{what} is loaded, and only names are measured")


def _microseconds(operate: Callable[[], None]) -> float:
    rounds = []
    for _ in range(NUM_ROUNDS):
        begin = time.perf_counter()
        for _ in range(ROUND):
            operate()
        rounds.append((time.perf_counter() - begin) / ROUND * 1e6)
    return round(statistics.median(rounds), 2)
