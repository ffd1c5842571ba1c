"""A token drawn by screening is the one that all logits give, or none is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from lora_serve.bitmask import bitmask_of
from lora_serve.ops._cpu import Backend, usable_paths
from lora_serve.ops.cpu.linear import CpuLinears, CpuScreen
from lora_serve.ops.cpu.packing import CpuPacking
from lora_serve.ops.cpu.recording import Recorder
from lora_serve.ops.cpu.weights import Packed
from lora_serve.sampling.host import token_choice
from lora_serve.sampling.specification.sampler import sample
from lora_serve.sampling.specification.weights import relative_weights
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import SampleInput

UNDECIDED = -1
VOCAB_SIZE, WIDTH = 3999, 96


@dataclass(frozen=True)
class Head:
    """An LM head on one path."""

    linears: CpuLinears
    packed: Packed
    screen: CpuScreen

    @classmethod
    def of(cls, path: str, weight: Tensor) -> Head:
        native = Backend(path, 2)
        linears = CpuLinears(native, Recorder(native), CpuPacking(native))
        packed = linears.pack_linear(weight, None)
        screen = linears.pack_screen(weight, packed)
        assert screen is not None
        return cls(linears, packed, screen)

    def drawn(self, x: Tensor, inputs: Sequence[SampleInput]) -> list[int]:
        masks = [item.bitmask for item in inputs]
        return self.screen.draw(x, masks, [token_choice(item) for item in inputs])

    def by_all_logits(self, x: Tensor, inputs: Sequence[SampleInput]) -> list[int]:
        return [token for token, _ in sample(self.linears.linear(x, self.packed), inputs)]

    def draws_what_all_logits_do(
        self, x: Tensor, params: SamplingParams, num_draws: int = 40
    ) -> set[int]:
        """The tokens that one state gives at many positions, none of them in question."""
        inputs = [SampleInput(params, seed=7, position=i) for i in range(num_draws)]
        rows = x.expand(num_draws, -1).contiguous()
        expected = self.by_all_logits(rows, inputs)
        assert self.drawn(rows, inputs) == expected
        return set(expected)


@pytest.fixture(params=usable_paths())
def path(request: pytest.FixtureRequest) -> str:
    return request.param


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def any_input(rng: np.random.Generator) -> SampleInput:
    def one_of(*values: float) -> float:
        return values[rng.integers(len(values))]

    num_allowed = int(one_of(5, 200, 3000))
    allowed = rng.permutation(VOCAB_SIZE)[:num_allowed].tolist()
    return SampleInput(
        SamplingParams(
            temperature=one_of(0.0, 0.05, 0.3, 1.0, 2.0),
            top_k=int(one_of(0, 1, 2, 7, 50, VOCAB_SIZE - 1)),
            top_p=one_of(1.0, 0.9, 0.5, 1e-12),
            min_p=one_of(0.0, 0.0, 1e-30, 0.01, 0.4, 1.0),
        ),
        seed=int(rng.integers(2**63)),
        position=int(rng.integers(2**40)),
        bitmask=bitmask_of(allowed, VOCAB_SIZE) if rng.random() < 0.25 else None,
    )


def test_random_draws(path: str, dtype: torch.dtype) -> None:
    head = Head.of(path, random(VOCAB_SIZE, WIDTH, dtype=dtype, seed=1))
    rng = np.random.default_rng(2)
    inputs = [any_input(rng) for _ in range(192)]
    x = random(len(inputs), WIDTH, dtype=dtype, seed=3)
    tokens: list[int] = []
    for start in range(0, len(inputs), 64):
        tokens += head.drawn(x[start : start + 64], inputs[start : start + 64])
    for token, expected in zip(tokens, head.by_all_logits(x, inputs), strict=True):
        assert token in (expected, UNDECIDED)
    for token, item in zip(tokens, inputs, strict=True):
        params = item.params
        if params.temperature < 0.1 or 0 < params.top_k < 10 or params.min_p >= 0.4:
            assert token != UNDECIDED, item


def test_a_row_is_drawn_as_if_it_were_alone(path: str) -> None:
    head = Head.of(path, random(VOCAB_SIZE, WIDTH, dtype=torch.bfloat16, seed=4))
    rng = np.random.default_rng(5)
    inputs = [any_input(rng) for _ in range(12)]
    x = random(len(inputs), WIDTH, dtype=torch.bfloat16, seed=6)
    alone = [head.drawn(x[i : i + 1], inputs[i : i + 1])[0] for i in range(len(inputs))]
    assert head.drawn(x, inputs) == alone


def test_of_equals_at_the_kth_place_the_first_are_drawn(path: str, dtype: torch.dtype) -> None:
    weight = random(VOCAB_SIZE, WIDTH, dtype=dtype, seed=7) / 8
    x = random(1, WIDTH, dtype=dtype, seed=8)
    weight[[3990, 2000, 70, 1300]] = x[0]
    params = SamplingParams(temperature=5.0, top_k=3)
    assert Head.of(path, weight).draws_what_all_logits_do(x, params) == {70, 1300, 2000}


def test_a_kth_token_whose_codes_say_less(path: str, dtype: torch.dtype) -> None:
    """Codes cut 10.4375 to 10, and raise 10.5625 to 11: by them, the last of 500 is larger."""
    weight = torch.zeros(4000, 128, dtype=dtype)
    weight[:, 0] = 127.0  # so that a step is 1
    weight[3000, 1:] = 10.4375
    weight[[20, 900], 1:] = 12.0
    weight[500, 1:65], weight[500, 65:] = 10.5625, 10.0
    x = torch.ones(1, 128, dtype=dtype)
    params = SamplingParams(temperature=500.0, top_k=3)
    assert Head.of(path, weight).draws_what_all_logits_do(x, params) == {20, 900, 3000}


def few_logits(dtype: torch.dtype, logits: dict[int, float]) -> tuple[Tensor, Tensor]:
    """A weight and a state whose logits are these, and -100 elsewhere."""
    weight = torch.zeros(4000, 64, dtype=dtype)
    weight[:, 0] = -100.0
    for token, logit in logits.items():
        weight[token, 0] = logit
    x = torch.zeros(1, 64, dtype=dtype)
    x[0, 0] = 1.0
    return weight, x


@pytest.mark.parametrize("step", [0, 1])
def test_what_weighs_just_min_p_is_drawn(path: str, dtype: torch.dtype, step: int) -> None:
    """And not a token that weighs the least bit less."""
    weight, x = few_logits(dtype, {40: 0.5, 3333: -0.5, 2100: -0.5625})
    just = relative_weights(np.array([0.5, -0.5], np.float32), np.float32(1.0))[1]
    min_p = float(np.nextafter(just, np.float32(1)) if step else just)
    params = SamplingParams(temperature=1.0, min_p=min_p)
    drawn = Head.of(path, weight).draws_what_all_logits_do(x, params)
    assert drawn == ({40} if step else {40, 3333})


def test_what_weighs_one_unit_is_drawn_when_its_turn_comes(path: str) -> None:
    """The number of this position is below 480 of 2^40, which is what the first tokens weigh."""
    weight, x = few_logits(torch.float32, {3000: 8.0})
    weight[:480, 0] = 8.0 - 27.7
    inputs = [SampleInput(SamplingParams(temperature=1.0), seed=0, position=6144536686)]
    head = Head.of(path, weight)
    assert head.drawn(x, inputs) == head.by_all_logits(x, inputs)
    assert 0 <= head.drawn(x, inputs)[0] < 480


def test_a_flat_distribution_is_left_to_all_logits(path: str) -> None:
    head = Head.of(path, random(VOCAB_SIZE, WIDTH, dtype=torch.bfloat16, seed=9))
    x = random(1, WIDTH, dtype=torch.bfloat16, seed=10)
    params = SamplingParams(temperature=1.0)
    assert head.drawn(x, [SampleInput(params, 0, 0)]) == [UNDECIDED]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e20])
def test_states_that_are_not_screened(path: str, value: float) -> None:
    head = Head.of(path, random(VOCAB_SIZE, WIDTH, dtype=torch.bfloat16, seed=11))
    x = random(2, WIDTH, dtype=torch.bfloat16, seed=12)
    x[1, 40] = value
    inputs = [SampleInput(SamplingParams(temperature=1.0, top_k=4), 0, 0)] * 2
    tokens = head.drawn(x, inputs)
    assert tokens == [*head.by_all_logits(x[:1], inputs[:1]), UNDECIDED]
