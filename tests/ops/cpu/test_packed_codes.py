"""Codes of checkpoints in as few bytes as hold them, with the bits of floats and whole bytes.

What is compared with is the same weight above 16 rows that no smaller form holds: with them all
codes stay bytes, or nibbles, and all numbers floats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as GgmlType
from torch import Tensor

from lora_serve.models.checkpoints.ggml_blocks import BLOCK_TYPES
from lora_serve.ops.contract import Ops
from lora_serve.ops.cpu.packing import CpuPacking
from lora_serve.ops.kept_packing import PackedParts
from lora_serve.ops.quantization import CodeFormat, QuantizedWeight, stacked
from tests.fakes.gguf_files import random_blocks
from tests.ops.cases import normal

cpu = pytest.importorskip("lora_serve.ops.cpu.backend", reason="the native kernels are not built")

ROWS, WIDTH = 48, 512


@pytest.fixture(params=cpu.usable_paths(), scope="module")
def ops(request: pytest.FixtureRequest) -> Ops:
    return cpu.load(request.param, 2)


def ggml(name: str, rows: int = ROWS, width: int = WIDTH) -> QuantizedWeight:
    """Random blocks, as a file's are kept."""
    kind, form = BLOCK_TYPES[name], BLOCK_TYPES[name].form
    blocks = random_blocks((rows, width), GgmlType[name])
    kept = kind.kept(blocks.reshape(-1, GGML_QUANT_SIZES[GgmlType[name]][1]))
    groups = (rows, width // form.group)
    offsets = None if kept.offsets is None else torch.from_numpy(kept.offsets).reshape(groups)
    codes = torch.from_numpy(np.ascontiguousarray(kept.codes)).reshape(rows, width)
    return QuantizedWeight(form, codes, torch.from_numpy(kept.scales).reshape(groups), offsets)


def with_zero_points(dtype: torch.dtype) -> QuantizedWeight:
    """Codes of GPTQ and AWQ: 4 bits, scales of 16 bits, whole numbers of them as offsets."""
    form = CodeFormat("gptq", bits=4, group=128, least=-8, most=7)
    codes = torch.arange(ROWS * WIDTH).mul(7).remainder(16).sub(8).to(torch.int8)
    groups = WIDTH // form.group
    scales = normal(ROWS, groups, dtype=dtype, seed=1).float() / 64
    zeros = torch.arange(ROWS * groups).remainder(16).reshape(ROWS, groups)
    return QuantizedWeight(form, codes.reshape(ROWS, WIDTH), scales, scales * (8 - zeros))


# And the bits that a weight takes.
CASES: dict[str, tuple[Callable[[], QuantizedWeight], float]] = {
    "Q4_0": (lambda: ggml("Q4_0"), 4.5),
    "Q4_1": (lambda: ggml("Q4_1"), 5.0625),
    "Q5_0": (lambda: ggml("Q5_0"), 5.5),
    "Q5_1": (lambda: ggml("Q5_1"), 7.0625),
    "Q8_0": (lambda: ggml("Q8_0"), 8.5),
    "Q4_K": (lambda: ggml("Q4_K"), 4.6875),
    "Q5_K": (lambda: ggml("Q5_K"), 6.6875),
    "Q6_K": (lambda: ggml("Q6_K"), 6.5625),
    "Q4_K and Q6_K": (lambda: stacked([ggml("Q4_K", 32), ggml("Q6_K", 16)]), 7.1875),
    "Q5_K and Q6_K": (lambda: stacked([ggml("Q5_K", 16), ggml("Q6_K", 32)]), 7.1875),
    "Q5_0 and Q8_0": (lambda: stacked([ggml("Q5_0", 32), ggml("Q8_0", 16)]), 8.5),
    "part of Q4_K": (lambda: ggml("Q4_K", width=1024).with_columns(range(128, 640)), 4.8125),
    "part of Q6_K": (lambda: ggml("Q6_K", width=1024).with_columns(range(128, 640)), 6.625),
    "zero points of float16": (lambda: with_zero_points(torch.float16), 4.1875),
    "zero points of bfloat16": (lambda: with_zero_points(torch.bfloat16), 4.1875),
}
SAME_AS_FLOATS = pytest.mark.parametrize("name", CASES)


def above_strangers(weight: QuantizedWeight) -> QuantizedWeight:
    form, groups = weight.format, weight.scales.shape[1]
    codes = torch.full((16, weight.codes.shape[1]), 7 if form.bits == 4 else 127, dtype=torch.int8)
    offsets = None if weight.offsets is None else normal(16, groups, dtype=torch.float32, seed=9)
    scales = normal(16, groups, dtype=torch.float32, seed=8)
    return stacked([weight, QuantizedWeight(form, codes, scales, offsets)])


def bits_of_each(ops: Ops, weight: QuantizedWeight) -> float:
    assert ops.pack_codes is not None
    packed = ops.pack_codes(weight, None)
    return packed.weight.num_bytes * 8 / weight.codes.numel()


def product(ops: Ops, x: Tensor, weight: QuantizedWeight) -> Tensor:
    assert ops.pack_codes is not None
    return ops.linears.linear(x, ops.pack_codes(weight, None))


def assert_same_as_floats(ops: Ops, weight: QuantizedWeight, dtype: torch.dtype) -> None:
    rows, width = weight.codes.shape
    for num_rows in (1, 2, 5, 40):
        x = normal(num_rows, width, dtype=dtype, seed=num_rows)
        got, expected = product(ops, x, weight), product(ops, x, above_strangers(weight))
        as_whole = torch.int32 if dtype == torch.float32 else torch.int16
        assert torch.equal(got.view(as_whole), expected[:, :rows].contiguous().view(as_whole))


@SAME_AS_FLOATS
def test_fewer_bytes_have_the_bits_of_floats(ops: Ops, name: str, dtype: torch.dtype) -> None:
    make, bits = CASES[name]
    weight = make()
    assert bits_of_each(ops, weight) == bits
    assert bits_of_each(ops, above_strangers(weight)) > bits + 0.2
    assert_same_as_floats(ops, weight, dtype)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("Q5_0", "scales"),
        ("Q6_K", "scales"),
        ("Q4_1", "scales"),
        ("Q4_1", "offsets"),
        ("Q4_K", "scales"),
        ("Q4_K", "offsets"),
        ("zero points of float16", "offsets"),
    ],
)
def test_one_number_that_is_not_exact_leaves_all_of_them_floats(
    ops: Ops, name: str, what: str
) -> None:
    """It lies in the last row and group, and is as near as another float can be."""
    weight = CASES[name][0]()
    numbers = getattr(weight, what).clone()
    numbers[-1, -1] = numbers[-1, -1].nextafter(torch.tensor(1.0))
    odd = replace(weight, **{what: numbers})
    assert bits_of_each(ops, odd) > CASES[name][1] + 0.1
    assert_same_as_floats(ops, odd, torch.float32)


@pytest.mark.parametrize(("code", "bits"), [(15, 5.5), (16, 6.5), (31, 6.5), (32, 8.5), (-33, 8.5)])
def test_the_largest_code_says_how_many_bits_all_of_them_take(
    ops: Ops, code: int, bits: float
) -> None:
    weight = ggml("Q5_0")
    weight.codes[-1, -1] = code
    assert bits_of_each(ops, weight) == bits
    assert_same_as_floats(ops, weight, torch.float32)


def test_zeros_of_both_signs_and_scales_without_end_stay_what_they_are(ops: Ops) -> None:
    """A column of the unit matrix gives a scale, with its sign, and an infinity, back."""
    form = CodeFormat("stored", bits=8, group=32, least=-128, most=127)
    codes, scales = torch.zeros(16, 64, dtype=torch.int8), torch.ones(16, 2)
    codes[:, 0] = 1
    scales[:4, 0] = torch.tensor([0.0, -0.0, float("inf"), 2.0**-24])
    y = product(ops, torch.eye(64)[:1], QuantizedWeight(form, codes, scales))
    assert y[0, :4].tolist() == [0.0, 0.0, float("inf"), 2.0**-24]
    assert_same_as_floats(ops, QuantizedWeight(form, codes, scales), torch.float32)


def test_what_is_kept_says_how_it_was_packed(dtype: torch.dtype) -> None:
    """Its weight comes without numbers, which said it."""
    kernels = cpu.CpuKernels(cpu.usable_paths()[0], 2)
    packing, weight = CpuPacking(kernels.native), ggml("Q4_K")
    noted = packing.note()
    packed = packing.codes(weight)
    (part,) = noted
    packing.stop()
    packing.use([PackedParts(part.what, part.parts, part.layout, part.owner)])
    without = weight.with_rows(lambda rows: torch.empty_like(rows, device="meta"))
    assert packing.codes(without).layout == packed.layout
