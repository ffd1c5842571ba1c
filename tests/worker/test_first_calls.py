from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from lora_serve.config.model import ModelConfig
from lora_serve.errors import ConfigError
from lora_serve.worker import loaded_model
from lora_serve.worker.device import CpuDevice

SCRIPT = """
import torch
from lora_serve.worker.first_calls import call_functions_once
call_functions_once()
angles = torch.arange(8192, dtype=torch.float64) * 0.37
for function in (torch.cos, torch.sin, torch.exp):
    first = function(angles)
    assert torch.equal(first, function(angles))
    assert torch.equal(first, torch.cat([function(part) for part in angles.split(512)]))
"""


@pytest.mark.parametrize("turn", range(3))
def test_threads_that_are_first_to_ask_get_what_one_thread_gets(turn: int) -> None:
    """Without the calls before, about one process of four fails where threads sleep."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={"OMP_WAIT_POLICY": "PASSIVE", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


def test_a_load_calls_them_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    monkeypatch.setattr(loaded_model, "call_functions_once", lambda: called.append("functions"))
    with pytest.raises(ConfigError):
        loaded_model.load_model(ModelConfig(model="/nowhere"), CpuDevice(), 16)
    assert called == ["functions"]


def test_one_value_is_asked_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    from lora_serve.worker import first_calls

    sizes: list[int] = []
    monkeypatch.setattr(torch, "cos", lambda value: sizes.append(value.numel()))
    first_calls.call_functions_once()
    assert sizes == [1, 1]
