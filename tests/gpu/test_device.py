from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from lora_serve.worker.device import open_device

pytestmark = pytest.mark.gpu


def test_uploads_and_fills_are_ordered_with_the_work_around_them() -> None:
    device = open_device("cuda")
    target = device.upload(torch.zeros(1000))
    for value in range(50):
        device.fill(target, np.full(1000, value, np.float32))
        copy = target.clone()
        device.fill(target, np.full(1000, -1, np.float32))
        assert copy.unique().tolist() == [value]


def test_recorded_work_sees_what_its_memory_holds_when_it_is_replayed() -> None:
    device = open_device("cuda")
    given = device.upload(torch.zeros(3))
    work = device.record(lambda: given + 1)
    output = work.output
    for value in (4.0, 7.0):
        device.fill(given, np.full(3, value, np.float32))
        work.replay()
        assert output.tolist() == [value + 1] * 3


def test_what_another_thread_loaded_is_complete_when_its_block_ends() -> None:
    device = open_device("cuda")
    loaded: list[torch.Tensor] = []

    def load() -> None:
        with device.loading():
            loaded.append(device.upload(torch.arange(1_000_000)) + 1)

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    assert int(loaded[0].sum()) == sum(range(1, 1_000_001))


def test_the_peak_of_a_run_is_what_it_took_at_most() -> None:
    device = open_device("cuda")

    def run() -> torch.Tensor:
        return torch.ones(64 << 20, dtype=torch.uint8, device="cuda").sum()

    device.peak_bytes(run)  # the first time its kernels are loaded, which takes memory for good
    free = device.free_bytes()
    peak = device.peak_bytes(run)
    assert 64 << 20 <= peak < 80 << 20
    assert abs(device.free_bytes() - free) < 8 << 20
