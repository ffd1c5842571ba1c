"""When greedy tokens are looked for without all logits, and when they are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import msgspec
import pytest
import torch
from torch import Tensor

from lora_serve.layers.embedding import LMHead
from lora_serve.ops.contract import Ops, Runtime, ScreenedArgmax, ScreenedTokens, TokenChoice
from lora_serve.ops.reference import REFERENCE
from lora_serve.sampling.lm_head_screening import LMHeadScreening, with_screening
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import SampleInput

WEIGHT = torch.zeros(32, 16)
UNDECIDED = -1
GREEDY = SamplingParams(temperature=0.0)
PLAIN = SampleInput(GREEDY, 0, 5)


@dataclass
class Screening:
    """A backend's kernel that finds what the test sets."""

    finds: Sequence[int] = (3,)
    num_asked: int = 0
    packed: list[Tensor] = field(default_factory=list)
    bitmasks: Sequence[bytes | None] = ()

    def ops(self) -> Ops:
        return replace(REFERENCE, pack_screen=self._pack, runtime=Runtime("cpu"))

    def find(self, hidden: Tensor, bitmasks: Sequence[bytes | None]) -> list[int]:
        self.num_asked += 1
        self.bitmasks = list(bitmasks)
        return list(self.finds)

    def _pack(self, weight: Tensor, packed: object) -> ScreenedArgmax:
        self.packed.append(weight)
        return self.find


def tokens_of(screening: LMHeadScreening, num_rows: int = 1) -> list[int] | None:
    output = screening.sample(torch.zeros(num_rows, 16), [PLAIN] * num_rows)
    return None if output is None else [token for token, _ in output.wait()]


def test_what_the_backend_finds_is_sampled() -> None:
    argmax = LMHead(Screening((3, 7)).ops(), WEIGHT).screened_argmax
    assert argmax is not None
    assert tokens_of(LMHeadScreening(argmax), 2) == [3, 7]


def test_a_backend_without_screening_screens_nothing() -> None:
    assert LMHead(REFERENCE, WEIGHT).screened_argmax is None


def test_a_weight_that_has_no_screen() -> None:
    ops = replace(Screening().ops(), pack_screen=lambda weight, packed: None)
    assert LMHead(ops, WEIGHT).screened_argmax is None


def test_one_row_in_question_needs_all_logits() -> None:
    assert tokens_of(LMHeadScreening(Screening((3, UNDECIDED)).find), 2) is None


def test_one_request_that_asks_for_more_needs_all_logits() -> None:
    kernel = Screening((3, 7))
    inputs = [PLAIN, SampleInput(SamplingParams(temperature=1.0), 0, 5)]
    assert LMHeadScreening(kernel.find).sample(torch.zeros(2, 16), inputs) is None
    assert kernel.num_asked == 0


def test_states_in_question_are_asked_about_less_and_less_often() -> None:
    kernel = Screening((UNDECIDED,))
    screening = LMHeadScreening(kernel.find)
    asked = []
    for _ in range(250):
        before = kernel.num_asked
        assert tokens_of(screening) is None
        asked.append(kernel.num_asked > before)
    at = [step for step, is_asked in enumerate(asked) if is_asked]
    left_out = [later - earlier - 1 for earlier, later in pairwise(at)]
    assert left_out == [1, 2, 4, 8, 16, 32, 64, 64]
    kernel.finds = (3,)
    while tokens_of(screening) is None:
        pass
    kernel.finds = (UNDECIDED,)
    tokens_of(screening)
    before = kernel.num_asked
    tokens_of(screening)
    tokens_of(screening)
    assert kernel.num_asked == before + 1


def test_a_token_is_looked_for_among_those_that_a_grammar_allows() -> None:
    kernel = Screening((3, 7))
    inputs = [PLAIN, SampleInput(GREEDY, 0, 5, bitmask=b"\x80")]
    assert LMHeadScreening(kernel.find).sample(torch.zeros(2, 16), inputs) is not None
    assert kernel.bitmasks == [None, b"\x80"]


@dataclass
class Drawing(Screening):
    """A kernel that also draws what the test sets."""

    choices: Sequence[TokenChoice] = ()

    def __call__(self, hidden: Tensor, bitmasks: Sequence[bytes | None]) -> list[int]:
        return self.find(hidden, bitmasks)

    def draw(
        self, hidden: Tensor, bitmasks: Sequence[bytes | None], choices: Sequence[TokenChoice]
    ) -> list[int]:
        self.choices = choices
        return self.find(hidden, bitmasks)


def test_a_kernel_that_draws_is_told_how_each_row_is_drawn() -> None:
    kernel = Drawing((3, 7))
    params = SamplingParams(temperature=0.5, top_k=9, top_p=0.9, min_p=0.1)
    inputs = [PLAIN, SampleInput(params, -1, 6, bitmask=b"\x80")]
    output = LMHeadScreening(kernel).sample(torch.zeros(2, 16), inputs)
    assert output is not None
    assert output.wait() == [(3, None), (7, None)]
    assert kernel.bitmasks == [None, b"\x80"]
    assert list(kernel.choices) == [(0, 0, 1, 0, 0, 5), (2.0, 0.1, 0.9, 9, 2**64 - 1, 6)]


@pytest.mark.parametrize(("num_rows", "num_asked"), [(4, 1), (5, 0)])
def test_few_rows_are_drawn(num_rows: int, num_asked: int) -> None:
    kernel = Drawing((3,) * num_rows)
    inputs = [SampleInput(SamplingParams(temperature=1.0), 0, 5)] * num_rows
    LMHeadScreening(kernel).sample(torch.zeros(num_rows, 16), inputs)
    assert kernel.num_asked == num_asked


def test_draws_in_question_leave_out_no_greedy_step() -> None:
    kernel = Drawing((UNDECIDED,))
    screening = LMHeadScreening(kernel)
    drawn = [SampleInput(SamplingParams(temperature=1.0), 0, 5)]
    assert screening.sample(torch.zeros(1, 16), drawn) is None
    kernel.finds = (3,)
    assert screening.sample(torch.zeros(1, 16), drawn) is None
    assert tokens_of(screening) == [3]


def test_scaled_logits_are_not_drawn_from_products() -> None:
    ops = replace(REFERENCE, pack_screen=lambda weight, packed: Drawing())
    weight = WEIGHT.to(torch.bfloat16)
    assert isinstance(LMHead(ops, weight).screened_argmax, ScreenedTokens)
    scaled = LMHead(ops, weight, scale=0.5).screened_argmax
    assert scaled is not None
    assert not isinstance(scaled, ScreenedTokens)


def test_many_rows_need_all_logits() -> None:
    kernel = Screening((3,) * 65)
    assert tokens_of(LMHeadScreening(kernel.find), 65) is None
    assert kernel.num_asked == 0


def test_only_large_heads_are_screened() -> None:
    kernel = Screening()
    LMHead(with_screening(kernel.ops(), "auto", WEIGHT.nbytes + 1), WEIGHT)
    assert kernel.packed == []
    LMHead(with_screening(kernel.ops(), "auto", WEIGHT.nbytes), WEIGHT)
    assert kernel.packed == [WEIGHT]


@pytest.mark.parametrize(("setting", "is_screened"), [("on", True), ("off", False)])
def test_screening_can_be_turned_on_and_off(setting: str, is_screened: bool) -> None:
    head = LMHead(with_screening(Screening().ops(), setting), WEIGHT)
    assert (head.screened_argmax is not None) == is_screened


def test_a_plain_greedy_request_is_screenable() -> None:
    assert PLAIN.is_screenable


@pytest.mark.parametrize(
    "item",
    [
        SampleInput(SamplingParams(temperature=1.0), 0, 5),
        SampleInput(msgspec.structs.replace(GREEDY, logprobs=0), 0, 5),
        SampleInput(msgspec.structs.replace(GREEDY, logit_bias={3: 1.0}), 0, 5),
        SampleInput(msgspec.structs.replace(GREEDY, repetition_penalty=1.1), 0, 5),
        SampleInput(msgspec.structs.replace(GREEDY, presence_penalty=0.1), 0, 5),
        SampleInput(GREEDY, 0, 5, banned_token_ids=(2,)),
        SampleInput(GREEDY, 0, 5, bitmask=b"\xff", banned_token_ids=(2,)),
    ],
)
def test_others_need_all_logits(item: SampleInput) -> None:
    assert not item.is_screenable
