"""The order in which AMX adds up bfloat16, written down once more in numpy.

Of 16 words at a time, then of 8, then of what is left, the lower elements are added in one chain
and the upper ones in another, each from 0; both chains together are added to what was there. Sums
that cancel show every rounding. The tests of all paths hold AMX to the rest.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lora_serve.ops.contract import LoRAPart, Ops
from lora_serve.ops.quantization import INT4, INT8, CodeFormat, QuantizedWeight, quantize
from tests.ops.cases import PagedCase, normal

cpu = pytest.importorskip("lora_serve.ops.cpu.backend", reason="the native kernels are not built")

if "amx" not in cpu.usable_paths():
    pytest.skip("this machine has no AMX", allow_module_level=True)

Floats = np.ndarray
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def ops() -> Ops:
    return cpu.load("amx", 2)


def chain(left: Floats, right: Floats) -> Floats:
    """Sums (T, N) of left (T, K) times right (N, K), fused, in ascending order from 0.

    A product of two bfloat16 has 16 bits, so that adding it to a float is exact in double.
    """
    total = np.zeros((len(left), len(right)), np.float32)
    for k in range(left.shape[1]):
        exact = np.outer(left[:, k].astype(np.float64), right[:, k].astype(np.float64))
        total = (total + exact).astype(np.float32)
    return total


def steps(num_elements: int) -> list[slice]:
    """The elements of each step: 32, then 16, then what is left."""
    whole = num_elements // 32 * 32
    ends = [*range(32, whole + 1, 32)]
    if num_elements - whole >= 16:
        ends.append(whole + 16)
    if not ends or ends[-1] < num_elements:
        ends.append(num_elements)
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def in_tiles(left: Tensor, right: Tensor, sums: Floats | None = None) -> Floats:
    """left (T, K) times right (N, K), both bfloat16."""
    a, b = left.float().numpy(), right.float().numpy()
    total = np.zeros((len(a), len(b)), np.float32) if sums is None else sums
    for step in steps(a.shape[1]):
        x, w = a[:, step], b[:, step]
        total = total + (chain(x[:, 0::2], w[:, 0::2]) + chain(x[:, 1::2], w[:, 1::2]))
    return total


def that_cancel(rows: int, half: int) -> tuple[Tensor, Tensor]:
    a, b = normal(rows, half, dtype=BF16), normal(70, half, dtype=BF16, seed=1)
    return torch.cat((a, a), dim=1), torch.cat((b, -b), dim=1)


@pytest.mark.parametrize("half", [3, 8, 16, 24, 131, 448])
@pytest.mark.parametrize("rows", [1, 16, 40])
def test_linear(ops: Ops, rows: int, half: int) -> None:
    x, weight = that_cancel(rows, half)
    y = ops.linears.linear(x, ops.linears.pack_linear(weight, None))
    assert torch.equal(y, torch.from_numpy(in_tiles(x, weight)).to(BF16))
    assert half < 16 or y.any()


def test_segments_of_a_long_row_change_nothing(ops: Ops) -> None:
    """Many rows keep their sums in memory while the weights come in segments."""
    x, weight = that_cancel(300, 1100)
    y = ops.linears.linear(x, ops.linears.pack_linear(weight, None))
    assert torch.equal(y, torch.from_numpy(in_tiles(x, weight)).to(BF16))


def test_blocks_of_many_rows_change_nothing(ops: Ops) -> None:
    """Chunks, segments, left-over rows and a panel without a partner; with a bias, too."""
    x, weight = that_cancel(555, 1312)
    bias = normal(70, dtype=BF16, seed=2)
    y = ops.linears.linear(x, ops.linears.pack_linear(weight, bias))
    assert torch.equal(y, torch.from_numpy(in_tiles(x, weight) + bias.float().numpy()).to(BF16))


def test_another_order_is_noticed() -> None:
    """The mutants: one chain through all elements, and steps of 16 from the beginning."""
    x, weight = that_cancel(4, 131)
    expected = in_tiles(x, weight)
    a, b = x.float().numpy(), weight.float().numpy()
    assert not np.array_equal(chain(a, b), expected)
    halves = np.zeros_like(expected)
    for begin in range(0, a.shape[1], 16):
        halves = in_tiles(x[:, begin : begin + 16], weight[:, begin : begin + 16], halves)
    assert not np.array_equal(halves, expected)


@pytest.mark.parametrize("code_format", [INT8, INT4], ids=lambda f: f.name)
@pytest.mark.parametrize("rows", [1, 2, 40, 250])
@pytest.mark.parametrize("width", [256, 150, 243])
def test_quantized_linear(ops: Ops, code_format: CodeFormat, rows: int, width: int) -> None:
    """One row is multiplied in registers, in the order of tiles; a last group has all its steps."""
    x = normal(rows, width, dtype=BF16)
    weight = normal(101, width, dtype=BF16, seed=1)
    quantized = quantize(weight, code_format)
    total = np.zeros((rows, 101), np.float32)
    size = code_format.group
    for g, begin in enumerate(range(0, width, size)):
        group = in_tiles(
            x[:, begin : begin + size], quantized.codes[:, begin : begin + size].to(BF16)
        )
        scale = quantized.scales[:, g].double().numpy()
        total = (total + scale * group.astype(np.float64)).astype(np.float32)
    y = ops.linears.linear(x, ops.pack_quantized(weight, code_format, None, False))
    assert torch.equal(y, torch.from_numpy(total).to(BF16))


@pytest.mark.parametrize("has_offsets", [False, True])
@pytest.mark.parametrize("group", [16, 32, 128])
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_codes_times_a_row_are_the_same_alone_and_among_many(
    ops: Ops, bits: int, group: int, has_offsets: bool
) -> None:
    """Blocks of 32 rows, what is left over from them, and a panel without a partner."""
    assert ops.pack_codes is not None
    form = CodeFormat("stored", 4 if bits == 4 else 8, group, least=-128, most=127)
    random = torch.Generator().manual_seed(bits)
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (101, 352), generator=random)
    scales = normal(101, -(-352 // group), dtype=torch.float32)
    offsets = normal(*scales.shape, dtype=torch.float32, seed=1) if has_offsets else None
    packed = ops.pack_codes(QuantizedWeight(form, codes.to(torch.int8), scales, offsets), None)
    x = normal(601, 352, dtype=BF16)
    together = ops.linears.linear(x, packed)
    for row in (0, 31, 32, 287, 288, 299, 300, 301, 575, 599, 600):
        assert torch.equal(ops.linears.linear(x[row : row + 1].clone(), packed)[0], together[row])
    few = [ops.linears.linear(part.clone(), packed) for part in x.split(20)]
    assert torch.equal(torch.cat(few), together)


@pytest.mark.parametrize("bits", [4, 8])
def test_denormals_are_zero_to_a_row_alone_too(ops: Ops, bits: int) -> None:
    """Denormals of the row, and sums on their way; scales lift the rest to where it would show."""
    assert ops.pack_codes is not None
    form = CodeFormat("stored", bits, 32, least=-8, most=7)
    random = torch.Generator().manual_seed(bits)
    codes = torch.randint(-8, 8, (64, 128), generator=random, dtype=torch.int8)
    scales = torch.full((64, 4), 1e30)
    packed = ops.pack_codes(QuantizedWeight(form, codes, scales), None)
    x = normal(8, 128, dtype=torch.float32) * 2.0 ** -torch.arange(118.0, 134.0, 2.0)[:, None]
    together = ops.linears.linear(x.to(BF16), packed)
    assert together[:4].any()
    assert not together[-1].any()
    alone = [ops.linears.linear(row[None].clone(), packed) for row in x.to(BF16)]
    assert torch.equal(torch.cat(alone), together)


LEAST = 2.0**-126  # of the numbers that are not denormal


def alone_and_together(
    ops: Ops, form: CodeFormat, width: int, scale: float, placed: dict[int, tuple[float, int]]
) -> tuple[Tensor, Tensor]:
    """One row's outputs alone, and beside seven others. placed: x and code by column."""
    assert ops.pack_codes is not None
    x, codes = torch.zeros(8, width), torch.zeros(16, width, dtype=torch.int8)
    for column, (value, code) in placed.items():
        x[:, column], codes[:, column] = value, code
    scales = torch.full((16, -(-width // form.group)), scale)
    packed = ops.pack_codes(QuantizedWeight(form, codes, scales), None)
    row = x.to(BF16)
    return ops.linears.linear(row[:1].clone(), packed)[0], ops.linears.linear(row, packed)[-1]


@pytest.mark.parametrize("bits", [4, 8])
def test_a_groups_last_sum_is_flushed_for_a_row_alone_too(ops: Ops, bits: int) -> None:
    placed = {0: (LEAST, 1), 32: (1.5 * LEAST, -1)}
    form = CodeFormat("stored", bits, 64, least=-8, most=7)
    alone, together = alone_and_together(ops, form, 64, 1e30, placed)
    assert torch.equal(alone, together)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_zeros_that_fill_a_step_up_count_for_a_row_alone_too(ops: Ops, bits: int) -> None:
    """Sums that are flushed to -0 in a step of 8 columns, of which a tile sees 16."""
    above = LEAST * (1 + 2**-6)
    group_1 = {0: (LEAST, 4), 32: (4 * LEAST, -1), 34: (LEAST, 1), 36: (above, -1)}
    group_1 |= {68: (LEAST, 1), 69: (LEAST, 1), 70: (above, -1), 71: (above, -1)}
    placed = {0: (1e-10, -1)} | {128 + column: value for column, value in group_1.items()}
    form = CodeFormat("stored", bits, 128, least=-8, most=7)
    alone, together = alone_and_together(ops, form, 200, 1e-36, placed)
    assert torch.equal(alone.view(torch.int16), together.view(torch.int16))


def test_shrink(ops: Ops) -> None:
    """The unit matrix as B leaves what A made of x, which is added in float."""
    x, a = that_cancel(13, 131)
    part = LoRAPart(a, torch.eye(70, dtype=BF16), 1.0, 0)
    y = torch.zeros(len(x), 70, dtype=BF16)
    adapter = ops.adapters.pack_adapter([[part]])
    ops.adapters.lora(y, x, ops.adapters.plan_lora([(0, len(x), adapter)], len(x)), 0)
    assert torch.equal(y, torch.from_numpy(in_tiles(x, a)).to(BF16))


@pytest.mark.parametrize("seen", [1, 15, 16, 17, 64, 100])
def test_what_a_row_does_not_see_is_never_multiplied(ops: Ops, seen: int) -> None:
    """Slots behind the last token hold NaN, in the same step of a tile as seen ones."""
    case = PagedCase(ops, [seen], num_heads=6, num_kv_heads=2, head_size=80, dtype=BF16)
    out = case.step([(0, 0, seen)])[0]
    assert not out.isnan().any()


def test_torch_may_use_the_tiles_too(ops: Ops) -> None:
    """Its products configure the same registers, on the same thread."""
    alone = cpu.load("amx", 1)
    x, weight = that_cancel(7, 448)
    packed = alone.linears.pack_linear(weight, None)
    expected = alone.linears.linear(x, packed)
    other = normal(64, 512, dtype=BF16)
    for _ in range(20):
        other @ other.T
        assert torch.equal(alone.linears.linear(x, packed), expected)
