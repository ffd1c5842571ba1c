from __future__ import annotations

import msgspec
import pytest

from lora_serve.simulate.adapters import SimulatedThreads
from lora_serve.simulate.cores import Cores
from lora_serve.simulate.events import EventQueue
from lora_serve.simulate.executor import ReplicaClock
from tests.simulate.costs import BUSY


def test_an_adapter_that_is_prepared_beside_a_step_gets_its_share_of_the_cores() -> None:
    events = EventQueue()
    cores = Cores(2.0, events)
    costs = msgspec.structs.replace(BUSY, adapter_read_seconds=1.0, adapter_prepare_seconds=1.0)
    threads = SimulatedThreads(costs, cores, events, ReplicaClock())
    times: dict[str, float] = {}
    cores.worker(2.0).do(4.0, lambda: times.update(step=events.now))
    threads.start_read(lambda: threads.prepare(lambda: times.update(prepared=events.now)))
    events.run()
    assert times["prepared"] == pytest.approx(3.0)  # three threads want two cores
    assert times["step"] == pytest.approx(5.0)


def test_adapters_are_prepared_one_after_the_other() -> None:
    events = EventQueue()
    costs = msgspec.structs.replace(BUSY, adapter_prepare_seconds=1.0)
    threads = SimulatedThreads(costs, Cores(8.0, events), events, ReplicaClock())
    times: list[float] = []
    for _ in range(3):
        threads.prepare(lambda: times.append(events.now))
    events.run()
    assert times == pytest.approx([1.0, 2.0, 3.0])
