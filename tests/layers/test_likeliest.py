"""When the likeliest tokens are looked for without all logits, and when they are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import msgspec
import pytest
import torch
from torch import Tensor

from lora_serve.layers.embedding import LMHead
from lora_serve.ops import Ops, screen_heads
from lora_serve.ops.reference import REFERENCE
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import SampleInput

WEIGHT = torch.zeros(32, 16)
UNDECIDED = -1


@dataclass
class Screening:
    """A backend's `greedy` that finds what it is told to."""

    finds: Sequence[int] = (3,)
    num_asked: int = 0
    screened: list[Tensor] = field(default_factory=list)

    def ops(self) -> Ops:
        return replace(REFERENCE, pack_screen=self._pack, greedy=self._greedy)

    def _pack(self, weight: Tensor) -> str:
        self.screened.append(weight)
        return "screen"

    def _greedy(self, hidden: Tensor, packed: object, screen: str) -> list[int]:
        assert screen == "screen"
        self.num_asked += 1
        return list(self.finds)


def test_what_the_backend_finds_is_told() -> None:
    assert LMHead(Screening((3, 7)).ops(), WEIGHT).likeliest(torch.zeros(2, 16)) == [3, 7]


@pytest.mark.parametrize("missing", ["pack_screen", "greedy"])
def test_a_backend_without_a_part_of_it_screens_nothing(missing: str) -> None:
    ops = replace(Screening().ops(), **{missing: None})
    assert LMHead(ops, WEIGHT).likeliest(torch.zeros(1, 16)) is None


def test_a_weight_that_has_no_screen() -> None:
    ops = replace(Screening().ops(), pack_screen=lambda weight: None)
    assert LMHead(ops, WEIGHT).likeliest(torch.zeros(1, 16)) is None


def test_one_row_in_question_needs_all_logits() -> None:
    head = LMHead(Screening((3, UNDECIDED)).ops(), WEIGHT)
    assert head.likeliest(torch.zeros(2, 16)) is None


def test_states_in_question_are_asked_about_less_and_less_often() -> None:
    screening = Screening((UNDECIDED,))
    head = LMHead(screening.ops(), WEIGHT)
    asked = []
    for _ in range(250):
        before = screening.num_asked
        assert head.likeliest(torch.zeros(1, 16)) is None
        asked.append(screening.num_asked > before)
    at = [step for step, is_asked in enumerate(asked) if is_asked]
    left_out = [later - earlier - 1 for earlier, later in pairwise(at)]
    assert left_out == [1, 2, 4, 8, 16, 32, 64, 64]
    screening.finds = (3,)
    while head.likeliest(torch.zeros(1, 16)) is None:
        pass
    screening.finds = (UNDECIDED,)
    head.likeliest(torch.zeros(1, 16))
    before = screening.num_asked
    head.likeliest(torch.zeros(1, 16))
    head.likeliest(torch.zeros(1, 16))
    assert screening.num_asked == before + 1


def test_many_rows_need_all_logits() -> None:
    screening = Screening((3,) * 65)
    assert LMHead(screening.ops(), WEIGHT).likeliest(torch.zeros(65, 16)) is None
    assert screening.num_asked == 0


def test_only_large_heads_are_screened() -> None:
    screening = Screening()
    LMHead(screen_heads(screening.ops(), WEIGHT.nbytes + 1), WEIGHT)
    assert screening.screened == []
    LMHead(screen_heads(screening.ops(), WEIGHT.nbytes), WEIGHT)
    assert screening.screened == [WEIGHT]


GREEDY = SamplingParams(temperature=0.0)


def test_a_plain_greedy_request_takes_the_likeliest() -> None:
    assert SampleInput(GREEDY, 0, 5).takes_the_likeliest


@pytest.mark.parametrize(
    "item",
    [
        SampleInput(SamplingParams(temperature=1.0), 0, 5),
        SampleInput(msgspec.structs.replace(GREEDY, logprobs=0), 0, 5),
        SampleInput(msgspec.structs.replace(GREEDY, logit_bias={3: 1.0}), 0, 5),
        SampleInput(msgspec.structs.replace(GREEDY, repetition_penalty=1.1), 0, 5),
        SampleInput(msgspec.structs.replace(GREEDY, presence_penalty=0.1), 0, 5),
        SampleInput(GREEDY, 0, 5, banned_token_ids=(2,)),
    ],
)
def test_others_need_all_logits(item: SampleInput) -> None:
    assert not item.takes_the_likeliest
