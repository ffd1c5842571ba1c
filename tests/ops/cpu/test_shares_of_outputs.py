"""An output's bits do not depend on how many others a layer gives: what ranks rest on."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lora_serve.ops._cpu import usable_paths
from lora_serve.ops.contract import LoRAPart, Ops
from lora_serve.ops.cpu.backend import load
from lora_serve.ops.quantization import FORMATS

ROWS, INPUTS, OUTPUTS, LORA_RANK = 5, 130, 250, 20
CUTS = (0, 33, 64, 65, 191, OUTPUTS)  # inside and at the ends of what kernels take at once


def normal(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=usable_paths())
def ops(request: pytest.FixtureRequest) -> Ops:
    return load(request.param, 1)


DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])


@DTYPES
def test_of_a_linear_layer(ops: Ops, dtype: torch.dtype) -> None:
    x, weight = (normal(n, INPUTS, dtype=dtype, seed=n) for n in (ROWS, OUTPUTS))
    bias = normal(OUTPUTS, dtype=dtype, seed=1)

    def outputs(begin: int, end: int) -> Tensor:
        packed = ops.linears.pack_linear(weight[begin:end], bias[begin:end])
        return ops.linears.linear(x, packed)

    whole = outputs(0, OUTPUTS)
    for begin, end in pairwise(CUTS):
        assert torch.equal(outputs(begin, end), whole[:, begin:end])


@DTYPES
@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("activations", [False, True])
def test_of_a_quantized_layer(
    ops: Ops, dtype: torch.dtype, quantization: str, activations: bool
) -> None:
    x, weight = (normal(n, INPUTS, dtype=dtype, seed=n) for n in (ROWS, OUTPUTS))
    pack = ops.pack_quantized
    assert pack is not None

    def outputs(begin: int, end: int) -> Tensor:
        packed = pack(weight[begin:end], FORMATS[quantization], None, activations)
        return ops.linears.linear(x, packed)

    whole = outputs(0, OUTPUTS)
    for begin, end in pairwise(CUTS):
        assert torch.equal(outputs(begin, end), whole[:, begin:end])


@DTYPES
def test_of_an_adapter(ops: Ops, dtype: torch.dtype) -> None:
    x = normal(ROWS, INPUTS, dtype=dtype, seed=1)
    a, b = (
        normal(*shape, dtype=dtype, seed=2) for shape in ((LORA_RANK, INPUTS), (OUTPUTS, LORA_RANK))
    )
    y = normal(ROWS, OUTPUTS, dtype=dtype, seed=3)

    def outputs(begin: int, end: int) -> Tensor:
        part = LoRAPart(a, b[begin:end].contiguous(), 0.7, 0)
        plan = ops.adapters.plan_lora([(1, ROWS, ops.adapters.pack_adapter([[part]]))], ROWS)
        own = y[:, begin:end].clone(memory_format=torch.contiguous_format)
        ops.adapters.lora(own, x, plan, 0)
        return own

    whole = outputs(0, OUTPUTS)
    assert not torch.equal(whole, y)
    for begin, end in pairwise(CUTS):
        assert torch.equal(outputs(begin, end), whole[:, begin:end])


@DTYPES
def test_of_heads(ops: Ops, dtype: torch.dtype) -> None:
    """Attention of all heads, of each KV head's, and of some of the heads that share one."""
    heads, kv_heads, size, seq_len = 6, 2, 64, 37
    q, k, v = (
        normal(seq_len, n, size, dtype=dtype, seed=n + i)
        for i, n in enumerate((heads, kv_heads, kv_heads))
    )
    cos_sin = torch.cat((torch.ones(64, size // 2), torch.zeros(64, size // 2)), dim=1)
    positions = torch.arange(seq_len)
    plan = ops.attention.plan_attention(
        torch.tensor([0, seq_len], dtype=torch.int32),
        torch.tensor([seq_len], dtype=torch.int32),
        torch.tensor([[2, 0, 1]], dtype=torch.int32),
        16,
    )
    slots = torch.tensor([2, 0, 1])[positions // 16] * 16 + positions % 16

    def attended(first: int, count: int, some: slice) -> Tensor:
        own = slice(first, first + count)
        cache = ops.attention.new_kv_cache(3, 16, count, size, dtype)
        queries = q[:, some].clone()
        ops.attention.rotary_and_write_kv(
            queries, k[:, own].clone(), v[:, own].clone(), cos_sin, positions, cache, slots
        )
        return ops.attention.paged_attention(queries, cache, plan, 0.125, None, None)

    whole = attended(0, kv_heads, slice(0, heads))
    for head in range(kv_heads):
        for begin, end in ((0, 3), (0, 2), (2, 3)):
            some = slice(3 * head + begin, 3 * head + end)
            assert torch.equal(attended(head, 1, some), whole[:, some])
