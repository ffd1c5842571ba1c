from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import lora_serve.ops.triton.backend as triton_ops
from lora_serve.errors import ConfigError
from lora_serve.ops.triton.launch import INTERPRETER, machine_of


def test_a_card_that_is_too_old_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    turing = replace(INTERPRETER, capability=75)
    monkeypatch.setattr(triton_ops, "machine_of", lambda device: turing)
    with pytest.raises(ConfigError, match=r"capability 7\.5.*need 8\.0"):
        triton_ops.load(torch.device("cpu"), batch_invariant=False)


@pytest.mark.parametrize(("capability", "overlaps"), [((8, 9), False), ((9, 0), True)])
def test_cards_since_sm_90_overlap_launches(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], overlaps: bool
) -> None:
    major, minor = capability
    card = SimpleNamespace(
        multi_processor_count=132,
        shared_memory_per_multiprocessor=228 << 10,
        major=major,
        minor=minor,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert machine_of(torch.device("cuda")).overlaps_launches == overlaps
    assert not machine_of(torch.device("cpu")).overlaps_launches
