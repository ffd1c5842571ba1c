from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import lora_serve.ops.triton as triton_ops
from lora_serve.errors import ConfigError
from lora_serve.ops.triton.launch import INTERPRETER


def test_a_card_that_is_too_old_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    turing = replace(INTERPRETER, capability=75)
    monkeypatch.setattr(triton_ops, "machine_of", lambda device: turing)
    with pytest.raises(ConfigError, match=r"capability 7\.5.*need 8\.0"):
        triton_ops.load(torch.device("cpu"), batch_invariant=False)
