"""Every path of the native sampler against the specification in numpy: equal, not close."""

from __future__ import annotations

import itertools
import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_serve.config.model import LOGPROBS_MODES
from lora_serve.sampling.contract import Sampler
from lora_serve.sampling.logprobs_mode import LogprobsMode
from lora_serve.sampling.select import select_sampler
from lora_serve.sampling.specification.logprobs import token_logprobs
from lora_serve.sampling.specification.philox import random_bits
from lora_serve.sampling.specification.sampler import sample
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import SampleInput
from tests.fakes.sampling_inputs import inputs_for
from tests.ops.cases import normal
from tests.ops.conftest import dtype

cpu = pytest.importorskip("lora_serve.ops.cpu.backend", reason="the native kernels are not built")

VOCAB_SIZES = (1, 2, 15, 16, 17, 63, 64, 65, 511, 512, 513, 997, 5000)
NAN, INF = math.nan, math.inf

__all__ = ["dtype"]


@pytest.fixture(params=cpu.usable_paths(), scope="module")
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return sampler_of(request.param, 3)


def sampler_of(path: str | None = None, num_threads: int | None = None) -> Sampler:
    return select_sampler(cpu.load(path, num_threads))


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_any_choices_give_what_the_specification_gives(
    sampler: Sampler, dtype: torch.dtype, vocab_size: int
) -> None:
    for scale in (0.01, 1.0, 9.0):  # few bits: many ties in the 16-bit types
        logits = normal(40, vocab_size, dtype=dtype) * scale
        inputs = inputs_for(40, vocab_size, seed=vocab_size)
        assert sampler.sample(logits, inputs).wait() == sample(logits, inputs)


@pytest.mark.parametrize("k", [600, 2500, 4999])
def test_a_large_top_k_leaves_the_lowest_ids_among_equals(sampler: Sampler, k: int) -> None:
    """Zeros of both signs among them."""
    row = torch.tensor([0.0, -0.0, 1.0, -2.0, -INF, 0.5, NAN, INF]).repeat(700)[:5000]
    logits = row.repeat(40, 1)
    inputs = [SampleInput(SamplingParams(top_k=k, temperature=50.0), i, i) for i in range(40)]
    assert sampler.sample(logits, inputs).wait() == sample(logits, inputs)


def test_a_large_top_k_costs_no_sort() -> None:
    """Each row is one task: beside such a draw all other requests of a step wait."""
    logits, sampler = normal(1, 151_936, dtype=torch.bfloat16), sampler_of(num_threads=1)

    def seconds(params: SamplingParams) -> float:
        inputs, times = [SampleInput(params, 1, 1)], []
        for _ in range(5):
            begin = time.thread_time()
            sampler.sample(logits, inputs).wait()
            times.append(time.thread_time() - begin)
        return min(times)

    nucleus = seconds(SamplingParams(top_p=0.9))
    assert seconds(SamplingParams(top_k=151_935)) < 15 * nucleus  # a sort takes 60 times as long


@pytest.mark.parametrize("name", LOGPROBS_MODES)
@pytest.mark.parametrize("vocab_size", [1, 17, 513])
def test_every_mode_of_logprobs_is_that_of_the_specification(name: str, vocab_size: int) -> None:
    mode = LogprobsMode.named(name)
    sampler = select_sampler(cpu.load(num_threads=3), mode)
    logits, inputs = normal(60, vocab_size, dtype=torch.bfloat16) * 4, inputs_for(60, vocab_size, 8)
    assert sampler.sample(logits, inputs).wait() == sample(logits, inputs, mode)
    given = token_logprobs(logits, [0] * 60, 3, as_logits=mode.is_logits)
    assert sampler.token_logprobs(logits, [0] * 60, 3) == given


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(
        st.sampled_from([0.0, -0.0, 1.0, 1.5, -3.0, 20.0, NAN, INF, -INF, 3e38, -3e38, 1e-40]),
        min_size=1,
        max_size=80,
    ),
    seed=st.integers(0, 2**32),
)
def test_ties_and_broken_rows_give_what_the_specification_gives(
    sampler: Sampler, values: list[float], seed: int
) -> None:
    logits = torch.tensor([values] * 12)
    inputs = inputs_for(12, len(values), seed)
    assert sampler.sample(logits, inputs).wait() == sample(logits, inputs)


@pytest.mark.parametrize("value", [NAN, -INF, INF, 0.0])
def test_a_row_of_one_value_gives_what_the_specification_gives(
    sampler: Sampler, value: float
) -> None:
    logits = torch.full((40, 700), value)
    inputs = inputs_for(40, 700, seed=5)
    assert sampler.sample(logits, inputs).wait() == sample(logits, inputs)


@pytest.mark.parametrize("scale", [1.0, 12.0])
def test_a_vocabulary_of_151936_gives_what_the_specification_gives(scale: float) -> None:
    sampler = sampler_of()
    logits = normal(24, 151_936, dtype=torch.bfloat16) * scale
    inputs = inputs_for(24, 151_936, seed=1)
    assert sampler.sample(logits, inputs).wait() == sample(logits, inputs)
    ids = [int(i) for i in normal(24, dtype=torch.float32, seed=3).abs() * 1000]
    assert sampler.token_logprobs(logits, ids, 20) == token_logprobs(logits, ids, 20)


@pytest.mark.parametrize(
    ("num_top", "vocab_size"), list(itertools.product((0, 1, 5, 20), (1, 16, 300, 4099)))
)
def test_given_tokens_have_the_logprobs_of_the_specification(
    sampler: Sampler, dtype: torch.dtype, num_top: int, vocab_size: int
) -> None:
    logits = normal(9, vocab_size, dtype=dtype) * 4
    ids = [0, vocab_size - 1, *(i % vocab_size for i in range(7))]
    assert sampler.token_logprobs(logits, ids, num_top) == token_logprobs(logits, ids, num_top)


def test_a_row_gets_the_same_alone_and_on_any_number_of_threads(sampler: Sampler) -> None:
    logits, inputs = normal(30, 997, dtype=torch.bfloat16) * 5, inputs_for(30, 997, seed=2)
    together = sampler.sample(logits, inputs).wait()
    assert sampler_of(num_threads=1).sample(logits, inputs).wait() == together
    for row in range(30):
        alone = sampler.sample(logits[row : row + 1], inputs[row : row + 1]).wait()
        assert alone == [together[row]]


def test_logits_may_be_a_view_and_are_not_changed(sampler: Sampler) -> None:
    wide = normal(6, 900, dtype=torch.bfloat16)
    before = wide.clone()
    view, inputs = wide[:, 7:800], inputs_for(6, 793, seed=4)
    assert sampler.sample(view, inputs).wait() == sample(view.clone(), inputs)
    assert torch.equal(wide, before)


@given(seed=st.integers(-(2**63), 2**63 - 1), position=st.integers(0, 2**62))
def test_the_native_generator_is_philox(sampler: Sampler, seed: int, position: int) -> None:
    """2**12 equal logits show the first 12 bits of the number drawn."""
    item = SampleInput(SamplingParams(), seed, position)
    ((token, _),) = sampler.sample(torch.zeros(1, 4096), [item]).wait()
    assert token == random_bits(seed, position) >> 41


def test_no_rows_give_nothing(sampler: Sampler) -> None:
    assert sampler.sample(torch.zeros(0, 5), []).wait() == []


def test_greedy_takes_the_lowest_id_of_the_most_likely(
    sampler: Sampler, dtype: torch.dtype
) -> None:
    logits = torch.zeros(1500, 1500, dtype=dtype)
    logits.fill_diagonal_(1.0)
    logits[:, -1] = 1.0
    greedy = SampleInput(SamplingParams(temperature=0.0), 0, 0)
    tokens = sampler.sample(logits, [greedy] * 1500).wait()
    assert [token for token, _ in tokens] == list(range(1500))
