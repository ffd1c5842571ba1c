from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lora_serve.adapters.checkpoint import read_adapter
from lora_serve.layers.rotary import RopeSpec
from lora_serve.models.layout import lora_modules
from lora_serve.models.spec import DecoderSpec
from lora_serve.ops.reference import REFERENCE
from lora_serve.step import AdapterCheckpoint
from lora_serve.worker.lora_slots import LoRASlots
from tests.fakes.adapter_files import lora_tensors, write_adapter

SPEC = DecoderSpec(
    architecture="LlamaForCausalLM",
    vocab_size=32,
    hidden_size=16,
    intermediate_size=24,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_size=8,
    rms_norm_eps=1e-6,
    rope=RopeSpec(),
    max_positions=64,
    qkv_bias=False,
    output_bias=False,
    qk_norm=False,
    tie_word_embeddings=True,
    sliding_window=None,
    dtype=None,
)


@pytest.fixture
def slots() -> LoRASlots:
    return LoRASlots(SPEC, REFERENCE, torch.float32)


@pytest.fixture
def checkpoint(tmp_path: Path) -> AdapterCheckpoint:
    path = write_adapter(tmp_path, lora_tensors(lora_modules(SPEC)))
    return read_adapter(path, lora_modules=lora_modules(SPEC), max_lora_rank=8)


def test_weights_serve_from_their_step_until_they_are_dropped(
    slots: LoRASlots, checkpoint: AdapterCheckpoint
) -> None:
    slots.prepare(checkpoint)
    with pytest.raises(KeyError):
        slots[checkpoint.digest]
    slots.change((), (checkpoint.digest,))
    assert slots[checkpoint.digest]
    slots.change((checkpoint.digest,), ())
    with pytest.raises(KeyError):
        slots[checkpoint.digest]


def test_two_names_may_be_loaded_with_the_same_bytes_in_one_step(
    slots: LoRASlots, checkpoint: AdapterCheckpoint
) -> None:
    slots.prepare(checkpoint)
    slots.prepare(checkpoint)
    slots.change((), (checkpoint.digest, checkpoint.digest))
    assert slots[checkpoint.digest]
    with pytest.raises(KeyError):
        slots.change((), (checkpoint.digest,))


def test_bytes_prepared_again_before_the_first_step_outlive_the_first_ones_end(
    slots: LoRASlots, checkpoint: AdapterCheckpoint
) -> None:
    slots.prepare(checkpoint)
    slots.prepare(checkpoint)  # the loader is ahead of the engine
    slots.change((), (checkpoint.digest,))
    slots.change((checkpoint.digest,), ())
    slots.change((), (checkpoint.digest,))
    assert slots[checkpoint.digest]
