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
    device.fill(target, host)
    assert target.tolist() == [0, 1, 2]
    with device.loading():
        assert device.record(lambda: target) is None


@WITHOUT_GPU
def test_auto_takes_the_cpu_where_there_is_no_gpu() -> None:
    assert isinstance(open_device("auto"), CpuDevice)


@WITHOUT_GPU
def test_a_gpu_that_is_not_there_is_refused_with_what_to_look_at() -> None:
    with pytest.raises(ConfigError, match=r"--device cuda: torch .* sees no GPU .*nvidia-smi"):
        open_device("cuda")


def test_some_memory_is_available() -> None:
    assert available_memory_bytes() > 2**20
