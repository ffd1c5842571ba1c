"""The sampling kernels against the specification in numpy: equal, not close.

Blocks are small, so that few logits fill many of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from _pytest.mark import ParameterSet
from torch import Tensor

from lora_serve.config.model import LOGPROBS_MODES
from lora_serve.ops.contract import Ops
from lora_serve.ops.select import choose_ops
from lora_serve.ops.triton.launch import FUSES
from lora_serve.sampling.logprobs_mode import LogprobsMode
from lora_serve.sampling.select import select_sampler
from lora_serve.sampling.specification.draw import draw_token
from lora_serve.sampling.specification.logprobs import token_logprobs
from lora_serve.sampling.specification.philox import random_bits
from lora_serve.sampling.specification.sampler import sample
from lora_serve.sampling.specification.weights import relative_weights
from lora_serve.sampling.triton import draw, filters, sampler
from lora_serve.sampling.triton.filters import nucleus_limit
from lora_serve.sampling.triton.weights import relative_weight, share_of
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import SampleInput
from tests.fakes.sampling_inputs import inputs_for
from tests.fakes.seen_tokens import counted
from tests.ops.cases import normal

NAN, INF = math.nan, math.inf


def slowly(*values: object) -> list[ParameterSet]:
    """Cases that take many seconds where kernels are interpreted; on a GPU all are run."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


BLOCK = 64

Sample = Callable[[Tensor, Sequence[SampleInput]], list[tuple[int, object]]]


@pytest.fixture(params=["interpreted", pytest.param("cuda", marks=pytest.mark.gpu)])
def sample_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sample:
    monkeypatch.setattr(draw, "BLOCK", BLOCK)
    monkeypatch.setattr(draw, "BLOCKS_AT_ONCE", 4)
    monkeypatch.setattr(filters, "KEYS_AT_ONCE", 128)
    if request.param == "interpreted":
        ops: Ops = request.getfixturevalue("ops")
    else:
        ops = choose_ops((), torch.device("cuda"))
    here = select_sampler(ops)
    return lambda logits, inputs: here.sample(logits.to(ops.device), inputs).wait()


def drawing(position: int = 0, **params: object) -> SampleInput:
    return SampleInput(SamplingParams(**params), seed=3, position=position)  # type: ignore[arg-type]


@pytest.mark.parametrize("vocab_size", [1, 64, 65, *slowly(2, 63, 300)])
def test_any_choices_give_what_the_specification_gives(
    sample_here: Sample, dtype: torch.dtype, vocab_size: int
) -> None:
    for scale in (0.01, 6.0):  # few bits: many ties in the 16-bit types
        logits = normal(8, vocab_size, dtype=dtype) * scale
        inputs = inputs_for(8, vocab_size, seed=vocab_size + int(scale))
        assert sample_here(logits, inputs) == sample(logits, inputs)


def test_tokens_that_were_not_counted_yet_count(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "CHANGED_AT_ONCE", 5)
    logits = normal(24, 37, dtype=torch.bfloat16) * 4
    pending = [-1 if row % 3 else token for row, token in enumerate(logits.argmax(1).tolist())]
    choices = ({}, {"repetition_penalty": 4.0})
    inputs = [drawing(row, temperature=0.0, **choices[row // 2 % 2]) for row in range(24)]
    expected = sample(logits, list(map(counted, inputs, pending)))
    output = select_sampler(ops).sample(logits, inputs, torch.tensor(pending))
    assert output.wait() == expected
    assert expected != sample(logits, inputs)


@pytest.mark.parametrize("name", LOGPROBS_MODES)
def test_every_mode_of_logprobs_is_that_of_the_specification(ops: Ops, name: str) -> None:
    mode, inputs = LogprobsMode.named(name), inputs_for(24, 37, seed=6)
    logits = normal(24, 37, dtype=torch.bfloat16) * 4
    pending = [5 if item.params.has_penalties else -1 for item in inputs]
    here = select_sampler(ops, mode)
    expected = sample(logits, list(map(counted, inputs, pending)), mode)
    assert here.sample(logits, inputs, torch.tensor(pending)).wait() == expected
    given = token_logprobs(logits, [0] * 24, 3, as_logits=mode.is_logits)
    assert here.token_logprobs(logits, [0] * 24, 3) == given


@pytest.mark.parametrize("num_rows", [1, 2, 9, *slowly(33, 70)])
def test_any_number_of_rows_gives_what_the_specification_gives(
    sample_here: Sample, num_rows: int
) -> None:
    logits = normal(num_rows, 130, dtype=torch.bfloat16) * 3
    inputs = inputs_for(num_rows, 130, seed=num_rows)
    assert sample_here(logits, inputs) == sample(logits, inputs)


def test_a_row_gets_the_same_alone_and_in_parts(
    sample_here: Sample, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, inputs = normal(9, 130, dtype=torch.bfloat16) * 5, inputs_for(9, 130, seed=2)
    together = [sample_here(logits[i : i + 1], inputs[i : i + 1]) for i in range(9)]
    monkeypatch.setattr(sampler, "FILTERED_AT_ONCE", 2)
    assert [[each] for each in sample_here(logits, inputs)] == together


@pytest.mark.parametrize("seed", [0, *slowly(1, 2, 3)])
def test_ties_and_broken_rows_give_what_the_specification_gives(
    sample_here: Sample, seed: int
) -> None:
    rng = random.Random(seed)
    values = [0.0, -0.0, 1.0, 1.5, -3.0, 20.0, NAN, INF, -INF, 3e38, -3e38, 1e-40]
    found = rng.sample(values, rng.randrange(1, 12))
    logits = torch.tensor([rng.choices(found, k=100) for _ in range(12)])
    inputs = inputs_for(12, 100, seed)
    assert sample_here(logits, inputs) == sample(logits, inputs)


@pytest.mark.parametrize("value", [NAN, *slowly(0.0, -INF, INF, -3.4e38)])
def test_a_row_of_one_value_gives_what_the_specification_gives(
    sample_here: Sample, value: float
) -> None:
    logits = torch.full((10, 150), value)
    inputs = inputs_for(10, 150, seed=5)
    assert sample_here(logits, inputs) == sample(logits, inputs)


@pytest.mark.parametrize(
    "params",
    [{"top_k": 5}, *slowly({"top_p": 0.02}, {"top_k": 90}, {"top_p": 0.6, "top_k": 100})],
    ids=str,
)
def test_of_equals_the_lowest_ids_are_kept(sample_here: Sample, params: dict[str, float]) -> None:
    """Several draws of a row show who they are."""
    row = torch.zeros(200)
    row[::3] = 1.0
    inputs = [drawing(position, temperature=0.5, **params) for position in range(6)]
    logits = row.repeat(6, 1)
    assert sample_here(logits, inputs) == sample(logits, inputs)


def test_zeros_of_both_signs_are_equals(sample_here: Sample) -> None:
    logits = torch.tensor([-0.0, 0.0, -1.0] * 40).repeat(6, 1)
    choices = ({"temperature": 0.0}, {"top_k": 7}, {"top_p": 0.1})
    inputs = [drawing(row, **choices[row % 3]) for row in range(6)]
    assert sample_here(logits, inputs) == sample(logits, inputs)


@pytest.mark.parametrize("num_tokens", [4, *slowly(64)])
@pytest.mark.parametrize("top_p", [0.5, *slowly(0.25, 0.75)])
def test_top_p_may_end_exactly_at_a_token(
    sample_here: Sample, num_tokens: int, top_p: float
) -> None:
    """Quarters of the sum of 4 or 64 equal tokens are whole numbers of tokens."""
    logits = torch.zeros(16, num_tokens)
    inputs = [drawing(position, top_p=top_p) for position in range(16)]
    found = sample_here(logits, inputs)
    assert found == sample(logits, inputs)
    highest = max(token for token, _ in found)
    assert highest < top_p * num_tokens


@pytest.mark.parametrize("temperature", [1e-5, 1.0, *slowly(0.01, 2.0)])
@pytest.mark.parametrize("spread", [3.0, *slowly(0.3, 30.0)])
def test_filters_keep_what_they_should_however_flat_or_steep_a_row_is(
    sample_here: Sample, temperature: float, spread: float
) -> None:
    """Whether all levels reach a limit, some, or none."""
    choices: list[dict[str, float]] = [
        {},
        {"min_p": 0.3},
        {"top_k": 3},
        {"top_k": 170},
        {"top_p": 0.1},
        {"top_p": 0.97},
        {"top_p": 1 - 2**-53},
        {"top_k": 40, "top_p": 0.9, "min_p": 0.05},
    ]
    inputs = [drawing(i, temperature=temperature, **params) for i, params in enumerate(choices)]
    logits = normal(len(inputs), 200, dtype=torch.float32, seed=4) * spread
    assert sample_here(logits, inputs) == sample(logits, inputs)


def test_a_large_vocabulary_gives_what_the_specification_gives(ops: Ops) -> None:
    """The blocks are as large as in use."""
    logits = normal(6, 30_000, dtype=torch.bfloat16) * 3
    choices: list[dict[str, float]] = [{"temperature": 0.0}, {}, {"top_k": 20, "top_p": 0.8}]
    choices += [{"top_p": 0.9}, {"top_k": 9000}, {"min_p": 0.1}]
    inputs = [drawing(i, **params) for i, params in enumerate(choices)]
    assert select_sampler(ops).sample(logits, inputs).wait() == sample(logits, inputs)


def test_logits_may_be_a_view_and_are_not_changed(sample_here: Sample) -> None:
    wide = normal(6, 200, dtype=torch.bfloat16)
    before = wide.clone()
    view, inputs = wide[:, 7:150], inputs_for(6, 143, seed=4)
    assert sample_here(view, inputs) == sample(view.clone(), inputs)
    assert torch.equal(wide, before)


@pytest.mark.parametrize("params", [{}, *slowly({"top_k": 128}, {"top_p": 1 - 1e-12})], ids=str)
def test_a_draw_at_the_border_of_two_tokens_takes_the_second(
    sample_here: Sample, monkeypatch: pytest.MonkeyPatch, params: dict[str, float]
) -> None:
    """128 equal tokens: 54, 50 and 24 in three blocks, between others that weigh nothing."""
    row = torch.full((192,), -100.0)
    row[5:59] = row[70:120] = row[130:154] = 0.0
    borders = [0, 1, 53, 54, 55, 103, 104, 105, 127]
    numbers = [border << 46 for border in borders] + [(border << 46) - 1 for border in borders[1:]]
    monkeypatch.setattr(sampler, "many_random_bits", lambda seeds, positions: numbers)
    inputs = [drawing(position, **params) for position in range(len(numbers))]
    chosen = SamplingParams(**params)  # type: ignore[arg-type]
    expected = [(draw_token(row.numpy(), chosen, number), None) for number in numbers]
    assert sample_here(row.repeat(len(numbers), 1), inputs) == expected


def test_the_random_number_is_that_of_seed_and_position(sample_here: Sample) -> None:
    """2**7 equal logits show its first 7 bits."""
    inputs = [drawing(position) for position in range(20)]
    tokens = sample_here(torch.zeros(20, 128), inputs)
    expected = [(random_bits(3, position) >> 46, None) for position in range(20)]
    assert tokens == expected


def test_no_rows_give_nothing(sample_here: Sample) -> None:
    assert sample_here(torch.zeros(0, 5), []) == []


@triton.jit
def shares_kernel(totals_ptr, randoms_ptr, top_p_ptr, shares_ptr, limits_ptr):
    at = tl.program_id(0)
    total = tl.load(totals_ptr + at)
    tl.store(shares_ptr + at, share_of(total, tl.load(randoms_ptr + at)))
    tl.store(limits_ptr + at, nucleus_limit(total, tl.load(top_p_ptr + at)))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_shares_and_limits_are_exact_in_64_bits(device: str) -> None:
    """Also for totals that are too large for a double."""
    rng = random.Random(8)
    totals = [rng.randrange(1, 2**62) for _ in range(60)] + [1, 2**62 - 1, 2**31, 2**31 - 1]
    randoms = [rng.randrange(2**53) for _ in range(60)] + [2**53 - 1, 2**53 - 1, 1, 2**27]
    top_p = [rng.random() for _ in range(60)] + [1e-12, 1 - 2**-53, 0.5, 0.9]
    bits = torch.tensor(top_p, dtype=torch.float64).view(torch.int64)
    given = [torch.tensor(totals), torch.tensor(randoms), bits]
    shares, limits = (torch.zeros(64, dtype=torch.int64, device=device) for _ in range(2))
    shares_kernel[(64,)](*(each.to(device) for each in given), shares, limits)
    assert shares.tolist() == [t * r >> 53 for t, r in zip(totals, randoms, strict=True)]
    assert limits.tolist() == [
        max(1, int(p * float(total))) for total, p in zip(totals, top_p, strict=True)
    ]


@triton.jit
def weights_kernel(differences_ptr, weights_ptr, scale, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    weight = relative_weight(tl.load(differences_ptr + at), scale, 0.0)
    tl.store(weights_ptr + at, weight)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("scale", [1.0, 0.5, 16.0])
def test_weights_have_the_bits_of_the_specification(device: str, scale: float) -> None:
    row = 8 * normal(4096, dtype=torch.float32)
    differences, found = (row - row.max()).to(device), torch.empty(4096, device=device)
    weights_kernel[(1,)](differences, found, scale, SIZE=4096, enable_fp_fusion=FUSES)
    expected = torch.from_numpy(relative_weights(row.numpy(), np.float32(scale)))
    assert torch.equal(found.cpu(), expected)
