from __future__ import annotations

import pytest
import torch

from lora_serve.errors import ConfigError
from lora_serve.worker.device import CpuDevice, available_memory_bytes, open_device

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def test_a_cpu_shares_its_memory_with_the_host() -> None:
    device = open_device("cpu")
    host = torch.arange(3)
    assert device.upload(host) is host
    target = torch.zeros(3, dtype=torch.int64)
    device.fill(target, host.numpy())
    assert target.tolist() == [0, 1, 2]
    with device.loading():
        assert device.upload(host) is host


def test_what_a_cpu_recorded_runs_again_into_the_same_output() -> None:
    given = torch.zeros(3)
    work = CpuDevice().record(lambda: given + 1)
    output = work.output
    given.fill_(4)
    assert output.tolist() == [1, 1, 1]
    work.replay()
    assert output.tolist() == [5, 5, 5]


@WITHOUT_GPU
def test_auto_takes_the_cpu_where_there_is_no_gpu() -> None:
    assert isinstance(open_device("auto"), CpuDevice)


@WITHOUT_GPU
def test_a_gpu_that_is_not_there_is_refused_with_what_to_look_at() -> None:
    with pytest.raises(ConfigError, match=r"--device cuda: torch .* sees no GPU .*nvidia-smi"):
        open_device("cuda")


def test_some_memory_is_available() -> None:
    assert available_memory_bytes() > 2**20
