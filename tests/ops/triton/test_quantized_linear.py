from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from lora_serve.ops.contract import Ops
from lora_serve.ops.quantization import INT4, INT8, CodeFormat, Quantization, QuantizedWeight
from lora_serve.ops.reference import REFERENCE
from lora_serve.ops.select import quantize_linears
from lora_serve.ops.triton import codes as codes_module
from lora_serve.ops.triton.codes import PackedCodes, pack_codes, tile_of_codes
from lora_serve.ops.triton.launch import Machine
from lora_serve.ops.triton.linear import RESERVED_SHARED_BYTES
from lora_serve.ops.triton.quantized_linear import quantized_linear_launches
from tests.ops.cases import assert_close, exact_linear, normal
from tests.ops.test_experts import NUM_CHOSEN, choices
from tests.ops.test_experts import (
    test_what_decides_between_experts_is_never_quantised as test_what_decides_is_never_quantised,
)
from tests.ops.test_quantized_linear import (
    EIGHT_BITS,
    FULL,
    packed_normal,
    test_rows_of_zeros_and_of_next_to_nothing_give_the_bias,
    test_what_is_not_finite_stays_in_its_row,
)

__all__ = [
    "test_rows_of_zeros_and_of_next_to_nothing_give_the_bias",
    "test_what_decides_is_never_quantised",
    "test_what_is_not_finite_stays_in_its_row",
]

BF16 = torch.bfloat16
SHAPED = pytest.mark.parametrize(("out_features", "in_features"), [(5, 7), (70, 300)])
STORED = [(4, 16), (4, 32), (4, 128), (4, 256), (8, 16), (8, 128), (8, 256)]


@SHAPED
@pytest.mark.parametrize("quantization", FULL, ids=str)
def test_it_is_the_references_product_to_a_rounding(
    ops: Ops, dtype: torch.dtype, quantization: Quantization, out_features: int, in_features: int
) -> None:
    x, shape = normal(5, in_features, dtype=dtype, seed=1), (out_features, in_features)
    got = ops.linears.linear(x, packed_normal(ops, quantization, shape, dtype))
    expected = REFERENCE.linears.linear(x, packed_normal(REFERENCE, quantization, shape, dtype))
    assert_close(got, expected.double(), dtype)


@SHAPED
@pytest.mark.parametrize("quantization", EIGHT_BITS, ids=str)
def test_activations_in_8_bits_give_the_references_very_bits(
    ops: Ops, dtype: torch.dtype, quantization: Quantization, out_features: int, in_features: int
) -> None:
    x, shape = normal(5, in_features, dtype=dtype, seed=1), (out_features, in_features)
    got = ops.linears.linear(x, packed_normal(ops, quantization, shape, dtype))
    expected = REFERENCE.linears.linear(x, packed_normal(REFERENCE, quantization, shape, dtype))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("quantization", FULL + EIGHT_BITS, ids=str)
def test_few_rows_in_spans_apart_get_the_bits_of_many_in_one_program(
    ops: Ops, dtype: torch.dtype, quantization: Quantization, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inputs are three spans here, the last of them short."""
    monkeypatch.setattr(codes_module, "SPAN", 128)
    packed = packed_normal(ops, quantization, (40, 300), dtype)
    x = normal(70, 300, dtype=dtype, seed=2)
    together = ops.linears.linear(x, packed)
    for start, end in [(0, 1), (5, 37), (30, 70)]:
        assert torch.equal(ops.linears.linear(x[start:end].clone(), packed), together[start:end])


def stored(form: CodeFormat, rows: int, width: int, *, has_offsets: bool) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(form.bits + form.group)
    codes = torch.randint(form.least, form.most + 1, (rows, width), generator=generator)
    shape = (rows, -(-width // form.group))
    scales = normal(*shape, dtype=torch.float32, seed=1)
    offsets = normal(*shape, dtype=torch.float32, seed=2) if has_offsets else None
    return QuantizedWeight(form, codes.to(torch.int8), scales, offsets)


def form_of(bits: int, group: int) -> CodeFormat:
    most = (1 << bits - 1) - 1
    return CodeFormat("stored", bits=bits, group=group, least=-most - 1, most=most)


@pytest.mark.parametrize("has_offsets", [False, True], ids=["scales", "offsets"])
@pytest.mark.parametrize(("bits", "group"), STORED)
def test_stored_codes_are_the_weight_that_they_stand_for(
    ops: Ops, bits: int, group: int, has_offsets: bool
) -> None:
    weight = stored(form_of(bits, group), 40, 280, has_offsets=has_offsets)
    x, bias = normal(35, 280, dtype=torch.float32), normal(40, dtype=torch.float32, seed=3)
    assert ops.pack_codes is not None
    packed = ops.pack_codes(weight, bias)
    got = ops.linears.linear(x, packed)
    exact = exact_linear(x, weight.dequantized(), bias)
    # Relative to what is summed: codes of one sign and their offset may cancel.
    summed = exact_linear(x.abs(), weight.dequantized().abs(), bias.abs()).max()
    assert (got - exact).abs().max() < 4e-6 * summed
    assert torch.equal(ops.linears.linear(x[34:].clone(), packed), got[34:])


def test_codes_take_their_bits_of_memory_and_no_more(ops: Ops) -> None:
    device = torch.device("cpu")
    for bits, group in STORED:
        weight = stored(form_of(bits, group), 8, 512, has_offsets=False)
        packed = pack_codes(weight, None, device, quantize_activations=False)
        taken = 8 if group == 16 else bits
        assert packed.codes.nbytes == 8 * 512 * taken // 8


@pytest.mark.parametrize("how", ["int4", "activations", "stored"])
def test_experts_are_quantised_as_linear_layers_are(ops: Ops, how: str) -> None:
    """Each pair has the bits that its expert's linear layer gives the row alone."""
    shape, num_experts, rows = (40, 70), 6, 5
    if how == "stored":
        form = form_of(4, 128)
        weights = [stored(form, *shape, has_offsets=True) for _ in range(num_experts)]
        assert ops.pack_codes is not None
        linears = [ops.pack_codes(each, normal(40, dtype=BF16)) for each in weights]
    else:
        quantized = quantize_linears(ops, Quantization(INT4, activations=how == "activations"))
        weights = [normal(*shape, dtype=BF16, seed=seed) for seed in range(num_experts)]
        linears = [quantized.linears.pack_linear(weight, None) for weight in weights]
    packed = ops.experts.pack_experts(linears)
    x = normal(rows, shape[1], dtype=BF16, seed=9)
    chosen = ops.experts.choose(choices(rows, BF16), NUM_CHOSEN, True)
    got = ops.experts.linear(x, packed, chosen).view(rows, NUM_CHOSEN, -1)
    for row, experts in enumerate(chosen.ids.tolist()):
        for j, expert in enumerate(experts):
            alone = ops.linears.linear(x[row : row + 1].clone(), linears[expert])
            assert torch.equal(got[row, j], alone[0])
    each = x.repeat_interleave(NUM_CHOSEN, 0)  # a row for each pair gives the same bits
    assert torch.equal(ops.experts.linear(each, packed, chosen).view_as(got), got)


def on_no_device(form: CodeFormat) -> PackedCodes:
    meta = torch.device("meta")
    codes = torch.empty(4096, 4096, dtype=torch.int8, device=meta)
    scales = torch.empty(4096, 4096 // form.group, device=meta)
    return pack_codes(QuantizedWeight(form, codes, scales), None, meta, quantize_activations=False)


@pytest.mark.parametrize(
    ("capability", "shared_bytes"), [(80, 166_912), (89, 101_376), (90, 232_448), (120, 101_376)]
)
@pytest.mark.parametrize("num_rows", [1, 8192])
def test_the_stages_of_a_tile_fit_a_cards_shared_memory(
    capability: int, shared_bytes: int, num_rows: int
) -> None:
    machine = Machine(100, capability, shared_bytes + RESERVED_SHARED_BYTES)
    for (bits, group), dtype in product(STORED, (torch.float16, BF16)):
        packed = on_no_device(form_of(bits, group))
        tile = tile_of_codes(dtype, num_rows, packed, machine)
        stage = tile.in_step * (tile.outs * packed.bits // 8 + tile.rows * dtype.itemsize)
        assert stage * tile.num_stages <= shared_bytes


def test_no_number_of_rows_but_few_and_many_needs_a_kernel_of_its_own() -> None:
    """Warming up runs a step of one row and the largest: no later step waits for the compiler."""
    machine = Machine(132, 90, 232_448)
    packed = on_no_device(INT8)

    def variants(num_rows: int) -> set[tuple[object, ...]]:
        x: Tensor = torch.empty(num_rows, 4096, dtype=BF16, device="meta")
        y = torch.empty(num_rows, 4096, dtype=BF16, device="meta")
        return {launch.variant for launch in quantized_linear_launches(x, packed, y, machine)}

    known = variants(1) | variants(8192)
    for num_rows in (2, 17, 32, 33, 64, 65, 500):
        assert variants(num_rows) <= known
