from __future__ import annotations

import gc
import random

import pytest
import torch
from torch import Tensor

from lora_serve.ops.cpu.memory import ChunkMemory, WeightMemory
from tests.ops.cpu.test_recording import DTYPE, Layers, ops_that_record

both = pytest.mark.parametrize("keeps_all", [False, True])


def overlap(one: Tensor, other: Tensor) -> bool:
    a, b = one.untyped_storage(), other.untyped_storage()
    return a.data_ptr() < b.data_ptr() + b.nbytes() and b.data_ptr() < a.data_ptr() + a.nbytes()


@both
def test_no_two_living_tensors_share_a_byte(keeps_all: bool) -> None:
    chance = random.Random(5)
    memory = ChunkMemory(keeps_all=keeps_all)
    alive: list[Tensor] = []
    for _ in range(500):
        if alive and chance.random() < 0.5:
            alive.pop(chance.randrange(len(alive)))
        shape = (chance.randrange(1, 40), chance.randrange(1, 3000))
        tensor = memory.take(shape, chance.choice((torch.bfloat16, torch.float32)))
        assert tuple(tensor.shape) == shape
        assert tensor.data_ptr() % 64 == 0
        assert not any(overlap(tensor, other) for other in alive)
        # A view may be all that is left of a tensor.
        alive.append(tensor[-1:].view(-1)[-1:] if chance.random() < 0.3 else tensor)


@both
def test_memory_of_a_dead_tensor_serves_the_next_that_it_is_large_enough_for(
    keeps_all: bool,
) -> None:
    memory = ChunkMemory(keeps_all=keeps_all)
    first = memory.take((1000,), DTYPE)
    view, address = first[10:20], first.data_ptr()
    del first
    assert memory.take((1000,), DTYPE).data_ptr() != address, "a view of it lives"
    del view
    again = [memory.take((900,), DTYPE) for _ in range(2)]
    assert address in [tensor.data_ptr() for tensor in again]


def test_a_tensor_that_grows_leaves_no_smaller_chunks_behind() -> None:
    memory = ChunkMemory(keeps_all=False)
    for size in range(1000, 3000, 10):
        pair = [memory.take((size,), DTYPE) for _ in range(2)]
        del pair
    assert [len(chunk) // DTYPE.itemsize for chunk in memory._free] == [2990, 2990]


def test_what_recorded_calls_point_to_is_kept() -> None:
    memory = ChunkMemory(keeps_all=True)
    small = memory.take((10,), DTYPE).data_ptr()
    large = memory.take((1000,), DTYPE)
    assert memory.take((5,), DTYPE).data_ptr() == small
    del large
    assert len(memory._free) == 2


def test_weights_of_a_layer_lie_where_those_of_the_layer_before_did() -> None:
    """And large ones in memory that the system may give in huge pages, from a multiple of 64 on."""
    memory, addresses = WeightMemory(), []
    kept = []
    for layer in range(3):
        codes = memory.take((1000, 300), torch.int8)
        scales = memory.take((1000, 30), torch.float32)
        assert not overlap(codes, scales)
        addresses.append((codes.data_ptr(), scales.data_ptr()))
        kept.append(memory.take((1000,), torch.float32).fill_(layer))
        kept.append(memory.take((1000, 200), torch.int8).fill_(layer))
        del codes, scales
    assert addresses[0] == addresses[1] == addresses[2]
    assert not any(address % 64 for pair in addresses for address in pair)
    for index, tensor in enumerate(kept):
        assert bool((tensor == index // 2).all()), "it was lent twice"


@torch.inference_mode()
def test_a_replay_writes_to_nothing_that_a_step_before_it_left_alive() -> None:
    """Large enough that the step's results are of memory that is used again and again."""
    ops, record = ops_that_record()
    layers = Layers(ops, 12_000)
    layers.input_ids.remainder_(20)
    work = record(layers)
    gc.collect()
    kept = [ops.rowwise.embed(layers.weight, layers.input_ids, None) for _ in range(3)]
    before = [tensor.clone() for tensor in kept]
    layers.input_ids.copy_((layers.input_ids + 7) % 20)
    work.replay()
    for tensor, expected in zip(kept, before, strict=True):
        assert torch.equal(tensor, expected)
    assert torch.equal(work.output, layers())
