from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from lora_serve.errors import ConfigError
from lora_serve.ops.cpu.memory import WeightMemory
from lora_serve.ops.quantization import (
    INT4,
    INT8,
    WEIGHTS_AT_ONCE,
    CodeFormat,
    Quantization,
    QuantizedWeight,
    quantize,
    stacked,
)
from lora_serve.ops.reference import REFERENCE
from lora_serve.ops.select import quantize_linears
from tests.ops.cases import normal

FORMATS = pytest.mark.parametrize("code_format", [INT8, INT4], ids=lambda f: f.name)
F32 = torch.float32


@FORMATS
@pytest.mark.parametrize("width", [1, 31, 32, 130, 896])
def test_a_weight_is_off_by_half_a_step_at_most(code_format: CodeFormat, width: int) -> None:
    """Or by a step, where the largest one is at the far end, and by the scale's own rounding."""
    weight = normal(5000, width, dtype=F32)
    quantized = quantize(weight, code_format)
    group = code_format.group
    assert quantized.scales.shape == (5000, -(-width // group))
    steps = quantized.scales.float().abs().repeat_interleave(group, dim=1)[:, :width]
    error = (quantized.dequantized() - weight).abs()
    most = torch.where(quantized.codes == code_format.most, 1.05, 0.5001) * steps
    assert (error <= most).all()
    assert quantized.codes.min() >= code_format.least
    assert quantized.codes.max() <= code_format.most


@FORMATS
def test_the_largest_of_a_group_has_the_largest_code(code_format: CodeFormat) -> None:
    largest = torch.zeros(2, 300)
    largest[0, 7], largest[1, 290] = -3.0, 5.0
    codes = quantize(largest, code_format).codes
    assert abs(int(codes[0, 7])) == abs(int(codes[1, 290])) == abs(code_format.least)
    assert codes.count_nonzero() == 2


@FORMATS
def test_a_group_of_zeros_stays_zero(code_format: CodeFormat) -> None:
    quantized = quantize(torch.zeros(3, 40), code_format)
    assert torch.equal(quantized.dequantized(), torch.zeros(3, 40))


def test_all_sixteen_codes_of_four_bits_are_of_use() -> None:
    assert quantize(normal(64, 64, dtype=F32), INT4).codes.unique().tolist() == list(range(-8, 8))


@FORMATS
def test_rows_are_quantised_by_themselves(code_format: CodeFormat) -> None:
    """Beyond what is quantised at once, too."""
    weight = normal(WEIGHTS_AT_ONCE // 33 + 3, 33, dtype=torch.bfloat16)
    whole = quantize(weight, code_format)
    last = quantize(weight[-5:], code_format)
    assert torch.equal(whole.codes[-5:], last.codes)
    assert torch.equal(whole.scales[-5:], last.scales)


def test_weights_of_several_formats_are_stacked_into_one_that_holds_each() -> None:
    narrow, wide = CodeFormat("a", 4, 32, -8, 7), CodeFormat("b", 8, 16, -127, 127)
    generator = torch.Generator().manual_seed(1)

    def weight(form: CodeFormat, rows: int, has_offsets: bool) -> QuantizedWeight:
        codes = torch.randint(form.least, form.most, (rows, 96), generator=generator)
        numbers = torch.randn(2, rows, 96 // form.group, generator=generator)
        offsets = numbers[1] if has_offsets else None
        return QuantizedWeight(form, codes.to(torch.int8), numbers[0], offsets)

    parts = [weight(narrow, 3, True), weight(wide, 2, False), weight(narrow, 1, False)]
    both = stacked(parts)
    assert (both.format.name, both.format.bits, both.format.group) == ("a+b", 8, 16)
    expected = torch.cat([part.dequantized() for part in parts])
    assert torch.equal(both.dequantized(), expected)
    assert torch.equal(both.with_rows(lambda rows: rows.flip(0)).dequantized(), expected.flip(0))
    assert stacked(parts[2:]).offsets is None
    elsewhere = stacked(parts, WeightMemory().take)
    assert torch.equal(elsewhere.codes, both.codes)
    assert torch.equal(elsewhere.dequantized(), expected)


def test_how_linear_layers_are_computed_is_part_of_the_numerics() -> None:
    plain, both = Quantization(INT8), Quantization(INT4, activations=True)
    assert quantize_linears(REFERENCE, plain).numerics.endswith(",int8-group128")
    assert quantize_linears(REFERENCE, both).numerics.endswith(",int4-group32-activations8")


def test_a_backend_without_quantised_kernels_is_named() -> None:
    ops = replace(REFERENCE, name="slate", pack_quantized=None)
    with pytest.raises(ConfigError, match=r"--quantization int4: the slate kernels have no"):
        quantize_linears(ops, Quantization(INT4))
