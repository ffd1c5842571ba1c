from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lora_serve.ops.contract import Ops
from lora_serve.ops.quantization import INT4, INT8, CodeFormat, Quantization, quantize
from lora_serve.ops.select import quantize_linears
from tests.ops.cases import assert_close, exact_linear, normal

NUM_EXPERTS, NUM_CHOSEN, IN, OUT = 6, 2, 96, 40


def choices(rows: int, dtype: torch.dtype = torch.float32, seed: int = 3) -> Tensor:
    """Logits of which none are equal, but no row takes expert 4."""
    logits = normal(rows, NUM_EXPERTS, dtype=dtype, seed=seed)
    logits[:, 4] = -9.0
    return logits


def weights_of(dtype: torch.dtype) -> list[Tensor]:
    return [normal(OUT, IN, dtype=dtype, seed=10 + e) for e in range(NUM_EXPERTS)]


@pytest.mark.parametrize("among_chosen", [False, True], ids=["all", "chosen"])
@pytest.mark.parametrize("num_experts", [3, 16, 60])
def test_a_row_takes_its_largest_logits_and_their_shares(
    ops: Ops, dtype: torch.dtype, num_experts: int, among_chosen: bool
) -> None:
    logits = normal(9, num_experts, dtype=dtype)
    chosen = ops.experts.choose(logits, 3, among_chosen)
    ordered, ids = logits.double().sort(descending=True, stable=True)
    assert torch.equal(chosen.ids, ids[:, :3].int())
    shares = (ordered[:, :3] if among_chosen else ordered).softmax(-1)[:, :3]
    assert chosen.weights.dtype == torch.float32
    torch.testing.assert_close(chosen.weights.double(), shares, rtol=2e-6, atol=0)


def test_of_equal_logits_the_first_are_taken(ops: Ops, dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0], [5.0] * 5], dtype=dtype)
    assert ops.experts.choose(logits, 3, True).ids.tolist() == [[1, 3, 2], [0, 1, 2]]


def test_logits_that_are_no_numbers_choose_experts_that_exist(ops: Ops, dtype: torch.dtype) -> None:
    logits = torch.full((2, 5), torch.nan, dtype=dtype)
    logits[1] = -torch.inf
    ids = ops.experts.choose(logits, 3, False).ids
    assert ((ids >= 0) & (ids < 5)).all()


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "biases"])
def test_each_pair_is_multiplied_with_its_experts_weight(
    ops: Ops, dtype: torch.dtype, has_bias: bool
) -> None:
    weights, biases = weights_of(dtype), [None] * NUM_EXPERTS
    if has_bias:
        biases = [normal(OUT, dtype=dtype, seed=20 + e) for e in range(NUM_EXPERTS)]
    pairs = zip(weights, biases, strict=True)
    packed = ops.experts.pack_experts([ops.linears.pack_linear(*pair) for pair in pairs])
    x = normal(30, IN, dtype=dtype)
    chosen = ops.experts.choose(choices(30, dtype), NUM_CHOSEN, True)
    exact = torch.cat(
        [
            exact_linear(row[None], weights[expert], biases[expert])
            for row, ids in zip(x, chosen.ids.tolist(), strict=True)
            for expert in ids
        ]
    )
    got = ops.experts.linear(x, packed, chosen)
    assert_close(got, exact, dtype)
    each = x.repeat_interleave(NUM_CHOSEN, 0)  # a row for each pair gives the same bits
    assert torch.equal(ops.experts.linear(each, packed, chosen), got)


def test_rows_of_other_tokens_change_no_bit_of_a_row(ops: Ops, dtype: torch.dtype) -> None:
    """Alone, its experts have one row each; in the batch up to all of them."""
    packed = ops.experts.pack_experts([ops.linears.pack_linear(w, None) for w in weights_of(dtype)])
    x, logits = normal(24, IN, dtype=dtype), choices(24, dtype)
    logits[9:] = logits[9]

    def mixed(rows: Tensor, logits: Tensor) -> Tensor:
        chosen = ops.experts.choose(logits, NUM_CHOSEN, False)
        return ops.experts.combine(ops.experts.linear(rows, packed, chosen), chosen)

    together = mixed(x, logits)
    for row in (0, 8, 23):
        alone = mixed(x[row : row + 1].clone(), logits[row : row + 1].clone())
        assert torch.equal(alone[0], together[row])
    assert torch.equal(mixed(x.flip(0), logits.flip(0)).flip(0), together)


@pytest.mark.parametrize("width", [5, 64, 300])
def test_pairs_are_summed_by_their_weights(ops: Ops, dtype: torch.dtype, width: int) -> None:
    chosen = ops.experts.choose(choices(9), NUM_CHOSEN, False)
    x = normal(9 * NUM_CHOSEN, width, dtype=dtype)
    pairs = x.double().view(9, NUM_CHOSEN, width)
    exact = (pairs * chosen.weights.double()[:, :, None]).sum(1)
    assert_close(ops.experts.combine(x, chosen), exact, dtype)


@pytest.mark.parametrize("width", [5, 64, 300])
def test_a_gate_says_how_much_is_added(ops: Ops, dtype: torch.dtype, width: int) -> None:
    x, total = normal(9, width, dtype=dtype), normal(9, width, dtype=dtype, seed=1)
    logits = normal(9, 1, dtype=dtype, seed=2) * 3
    exact = total.double() + x.double() * logits.double().sigmoid()
    got = ops.experts.add_gated(x, logits, total)
    assert got is total
    assert_close(got, exact, dtype)


def test_what_decides_between_experts_may_have_a_bias(ops: Ops, dtype: torch.dtype) -> None:
    weight, x = normal(NUM_EXPERTS, IN, dtype=dtype), normal(3, IN, dtype=dtype, seed=1)
    bias = normal(NUM_EXPERTS, dtype=dtype, seed=2)
    logits = ops.experts.gate(x, ops.experts.pack_gate(weight, bias))
    assert_close(logits, exact_linear(x, weight, bias), dtype)


def test_what_decides_between_experts_is_never_quantised(ops: Ops, dtype: torch.dtype) -> None:
    if ops.pack_quantized is None:
        pytest.skip(f"{ops.name} has no quantised linear layers")
    weight, x = normal(NUM_EXPERTS, IN, dtype=dtype), normal(3, IN, dtype=dtype, seed=1)
    plain, quantised = ops, quantize_linears(ops, Quantization(INT4, activations=False))
    logits = [each.experts.gate(x, each.experts.pack_gate(weight)) for each in (plain, quantised)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("how", ["weights", "both", "stored"])
@pytest.mark.parametrize("code_format", [INT8, INT4], ids=lambda each: each.name)
def test_experts_are_quantised_as_linear_layers_are(
    ops: Ops, dtype: torch.dtype, code_format: CodeFormat, how: str
) -> None:
    if ops.pack_quantized is None or ops.pack_codes is None:
        pytest.skip(f"{ops.name} has no quantised linear layers")
    if how == "stored":
        codes = [quantize(weight, code_format) for weight in weights_of(dtype)]
        linears = [ops.pack_codes(each, None) for each in codes]
    else:
        ops = quantize_linears(ops, Quantization(code_format, activations=how == "both"))
        linears = [ops.linears.pack_linear(weight, None) for weight in weights_of(dtype)]
    packed = ops.experts.pack_experts(linears)
    x = normal(30, IN, dtype=dtype)
    chosen = ops.experts.choose(choices(30, dtype), NUM_CHOSEN, True)
    got = ops.experts.linear(x, packed, chosen).view(30, NUM_CHOSEN, OUT)
    for row in range(30):
        for j, expert in enumerate(chosen.ids[row].tolist()):
            alone = ops.linears.linear(x[row : row + 1], linears[expert])
            assert torch.equal(got[row, j], alone[0])
