from __future__ import annotations

import os

import torch

from lora_serve.bench.machine import describe_machine


def test_the_machine_is_described_by_what_decides_its_speed() -> None:
    machine = describe_machine()
    assert machine.cpu
    assert machine.num_cores == len(os.sched_getaffinity(0))
    assert machine.memory_gib > 0.5
    assert machine.packages["torch"] == torch.__version__
    assert machine.commit
