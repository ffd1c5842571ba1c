from __future__ import annotations

import os
import platform
import re

import torch

from lora_serve.bench.machine import describe_machine


def test_the_machine_is_described_by_what_decides_its_speed() -> None:
    machine = describe_machine()
    assert machine.cpu
    if platform.machine() == "x86_64":
        assert re.search(r"\(family \d+, model \d+\)$", machine.cpu)
    assert machine.num_cores == len(os.sched_getaffinity(0))
    assert machine.memory_gib > 0.5
    # a build's own name may be known to torch alone: 2.11.0+cu130
    assert torch.__version__.startswith(machine.packages["torch"])
    assert machine.commit
