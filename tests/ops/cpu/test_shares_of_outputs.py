"""An output's bits do not depend on how many others a layer gives: what ranks rest on."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lora_serve.ops._cpu import usable_paths
from lora_serve.ops.contract import LoRAPart, Ops, PackedLinear
from lora_serve.ops.cpu.backend import load
from lora_serve.ops.quantization import FORMATS, INT8, CodeFormat, QuantizedWeight, quantize

OUTPUTS, LORA_RANK = 250, 20
CUTS = (0, 33, 64, 65, 191, OUTPUTS)  # inside and at the ends of what kernels take at once
NUM_EXPERTS = 3
Pack = Callable[[Ops, Tensor], PackedLinear]


def normal(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=usable_paths())
def ops(request: pytest.FixtureRequest) -> Ops:
    return load(request.param, 1)


DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
# Of a few rows, of a block of 32 and one more, of many; inputs that tiles divide, and others.
SIZES = pytest.mark.parametrize(("rows", "inputs"), [(1, 352), (5, 130), (33, 128), (128, 130)])


def assert_each_share_is_its_part(outputs: Callable[[int, int], Tensor]) -> Tensor:
    """outputs: of a range of them, by themselves. Gives all together."""
    whole = outputs(0, OUTPUTS)
    for begin, end in pairwise(CUTS):
        assert torch.equal(outputs(begin, end), whole[:, begin:end])
    return whole


@DTYPES
@SIZES
def test_of_a_linear_layer(ops: Ops, dtype: torch.dtype, rows: int, inputs: int) -> None:
    x, weight = (normal(n, inputs, dtype=dtype, seed=n) for n in (rows, OUTPUTS))
    bias = normal(OUTPUTS, dtype=dtype, seed=1)

    def outputs(begin: int, end: int) -> Tensor:
        packed = ops.linears.pack_linear(weight[begin:end], bias[begin:end])
        return ops.linears.linear(x, packed)

    assert_each_share_is_its_part(outputs)


@DTYPES
@SIZES
def test_of_a_gated_layer(ops: Ops, dtype: torch.dtype, rows: int, inputs: int) -> None:
    """Shares that one kernel takes with its activation, and shares that two kernels take."""
    x = normal(rows, inputs, dtype=dtype, seed=rows)
    gate, up = (normal(OUTPUTS, inputs, dtype=dtype, seed=seed) / 8 for seed in (1, 2))
    fused: set[bool] = set()

    def outputs(begin: int, end: int) -> Tensor:
        packed = ops.linears.pack_linear(torch.cat((gate[begin:end], up[begin:end])), None)
        assert ops.fuse_gated is not None
        by_one = ops.fuse_gated(packed, "silu")
        fused.add(by_one is not None)
        if by_one is not None:
            return by_one(x)
        return ops.rowwise.silu_and_mul(ops.linears.linear(x, packed))

    whole = outputs(0, OUTPUTS)
    for begin, end in (*pairwise(CUTS), (0, 32), (32, 160)):
        assert torch.equal(outputs(begin, end), whole[:, begin:end])
    assert fused == {False, True}


@DTYPES
@SIZES
@pytest.mark.parametrize("quantization", FORMATS)
@pytest.mark.parametrize("activations", [False, True])
def test_of_a_quantized_layer(
    ops: Ops, dtype: torch.dtype, rows: int, inputs: int, quantization: str, activations: bool
) -> None:
    x, weight = (normal(n, inputs, dtype=dtype, seed=n) for n in (rows, OUTPUTS))
    pack = ops.pack_quantized
    assert pack is not None

    def outputs(begin: int, end: int) -> Tensor:
        packed = pack(weight[begin:end], FORMATS[quantization], None, activations)
        return ops.linears.linear(x, packed)

    assert_each_share_is_its_part(outputs)


def stored_codes(bits: int, group: int, inputs: int, has_offsets: bool) -> QuantizedWeight:
    """Codes as a checkpoint has them: the first 64 outputs' parts fit fewer bits than all."""
    most = 2 ** (bits - 1) - 1
    form = CodeFormat("stored", bits, group, least=-most - 1, most=most)
    random = torch.Generator().manual_seed(bits + group)
    shape = (OUTPUTS, inputs)
    codes = torch.randint(form.least, most + 1, shape, generator=random, dtype=torch.int8)
    codes[:64] = codes[:64].clamp(-8, 7)
    groups = -(-inputs // group)
    numbers = [normal(OUTPUTS, groups, dtype=torch.float32, seed=seed) / most for seed in (3, 4)]
    for each in numbers:
        each[:64] = each[:64].half().float()
    scales, offsets = numbers
    return QuantizedWeight(form, codes, scales, offsets if has_offsets else None)


def share_of_codes(weight: QuantizedWeight, begin: int, end: int) -> QuantizedWeight:
    return weight.with_rows(lambda rows: rows[begin:end].contiguous())


@DTYPES
@SIZES
@pytest.mark.parametrize(("bits", "group"), [(4, 128), (8, 32)])
@pytest.mark.parametrize("has_offsets", [False, True], ids=["scales", "offsets"])
def test_of_codes_that_a_checkpoint_stores(
    ops: Ops, dtype: torch.dtype, rows: int, inputs: int, bits: int, group: int, has_offsets: bool
) -> None:
    """A share may be packed in fewer bits than the whole, where its codes are smaller."""
    x = normal(rows, inputs, dtype=dtype, seed=rows)
    weight = stored_codes(bits, group, inputs, has_offsets)
    pack, layouts = ops.pack_codes, set[tuple[int, ...]]()
    assert pack is not None

    def outputs(begin: int, end: int) -> Tensor:
        packed = pack(share_of_codes(weight, begin, end), None)
        layouts.add(tuple(packed.weight.layout))
        return ops.linears.linear(x, packed)

    assert_each_share_is_its_part(outputs)
    if bits == 8:
        assert len(layouts) > 1, "all shares are packed alike"


PACKS: dict[str, Pack] = {
    "floats": lambda ops, weight: ops.linears.pack_linear(weight, None),
    "int8": lambda ops, weight: quantized(ops, weight, "int8", False),
    "int4 of activations of 8 bits": lambda ops, weight: quantized(ops, weight, "int4", True),
    "codes": lambda ops, weight: as_stored(ops, weight),
}


def quantized(ops: Ops, weight: Tensor, name: str, activations: bool) -> PackedLinear:
    assert ops.pack_quantized is not None
    return ops.pack_quantized(weight, FORMATS[name], None, activations)


def as_stored(ops: Ops, weight: Tensor) -> PackedLinear:
    assert ops.pack_codes is not None
    return ops.pack_codes(quantize(weight, INT8), None)


@DTYPES
@SIZES
@pytest.mark.parametrize("pack", PACKS.values(), ids=[*PACKS])
def test_of_experts(ops: Ops, dtype: torch.dtype, rows: int, inputs: int, pack: Pack) -> None:
    """Rows choose two of three, so that kernels take as many rows of each as came."""
    x = normal(rows, inputs, dtype=dtype, seed=rows)
    weights = [normal(OUTPUTS, inputs, dtype=dtype, seed=seed) for seed in range(NUM_EXPERTS)]
    logits = normal(rows, NUM_EXPERTS, dtype=dtype, seed=9)
    chosen = ops.experts.choose(logits, 2, True)

    def outputs(begin: int, end: int) -> Tensor:
        own = [pack(ops, weight[begin:end].contiguous()) for weight in weights]
        return ops.experts.linear(x, ops.experts.pack_experts(own), chosen)

    whole = assert_each_share_is_its_part(outputs)

    def combined(begin: int, end: int) -> Tensor:
        return ops.experts.combine(whole[:, begin:end].contiguous(), chosen)

    assert_each_share_is_its_part(combined)


@DTYPES
@SIZES
def test_of_an_adapter(ops: Ops, dtype: torch.dtype, rows: int, inputs: int) -> None:
    x = normal(rows, inputs, dtype=dtype, seed=1)
    a, b = (
        normal(*shape, dtype=dtype, seed=2) for shape in ((LORA_RANK, inputs), (OUTPUTS, LORA_RANK))
    )
    y, first = normal(rows, OUTPUTS, dtype=dtype, seed=3), int(rows > 1)

    def outputs(begin: int, end: int) -> Tensor:
        part = LoRAPart(a, b[begin:end].contiguous(), 0.7, 0)
        plan = ops.adapters.plan_lora([(first, rows, ops.adapters.pack_adapter([[part]]))], rows)
        own = y[:, begin:end].clone(memory_format=torch.contiguous_format)
        ops.adapters.lora(own, x, plan, 0)
        return own

    assert not torch.equal(assert_each_share_is_its_part(outputs), y)


@DTYPES
@pytest.mark.parametrize("seq_len", [5, 37, 140])
def test_of_heads(ops: Ops, dtype: torch.dtype, seq_len: int) -> None:
    """Attention of all heads, of each KV head's, and of some of the heads that share one."""
    heads, kv_heads, size = 6, 2, 64
    blocks = torch.randperm(9, generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    q, k, v = (
        normal(seq_len, n, size, dtype=dtype, seed=n + i)
        for i, n in enumerate((heads, kv_heads, kv_heads))
    )
    cos_sin = torch.cat((torch.ones(160, size // 2), torch.zeros(160, size // 2)), dim=1)
    positions = torch.arange(seq_len)
    plan = ops.attention.plan_attention(
        torch.tensor([0, seq_len], dtype=torch.int32),
        torch.tensor([seq_len], dtype=torch.int32),
        blocks[None, : -(-seq_len // 16)].contiguous(),
        16,
    )
    slots = blocks.long()[positions // 16] * 16 + positions % 16

    def attended(first: int, count: int, some: slice) -> Tensor:
        own = slice(first, first + count)
        cache = ops.attention.new_kv_cache(9, 16, count, size, dtype)
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
