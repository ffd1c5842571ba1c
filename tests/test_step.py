from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from lora_serve.sampling.specification.adjust import adjusted
from lora_serve.sampling.specification.sampler import sample
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import SampleInput
from lora_serve.structured_outputs import ReasoningTokens, StructuredOutput
from tests.fakes.sampling_inputs import NOT_SEEN_BY_A_SAMPLER, inputs_for
from tests.fakes.seen_tokens import seen_tokens


@dataclass(frozen=True)
class Change:
    """What a sampling parameter does to one draw, shown by a value that is not its default."""

    value: Any
    changes_logits: bool = False
    needs_all_logits: bool = False
    is_greedy: bool = True


# Every parameter stands here. One that makes another token the largest changes the logits, and
# SampleInput.changes_logits must know it: otherwise greedy requests lose it in every sampler and in
# LM-head screening. One that only changes the weights of what is drawn leaves a greedy token alone.
# One needs all logits if its draw, or what is told of it, hangs on some that are too small to be
# drawn themselves: LM-head screening does not compute them.
CHANGES: dict[str, Change] = {
    # the logits themselves
    "presence_penalty": Change(0.5, changes_logits=True),
    "frequency_penalty": Change(0.5, changes_logits=True),
    "repetition_penalty": Change(1.5, changes_logits=True),
    "logit_bias": Change({2: 5.0}, changes_logits=True),
    # what is told of them
    "logprobs": Change(2, needs_all_logits=True),
    # which of the likely tokens is drawn: of no matter to a greedy request
    "top_p": Change(0.5),
    "top_k": Change(3),
    "min_p": Change(0.2),
    "seed": Change(7),
    # greedy or not
    "temperature": Change(1.0, is_greedy=False),
    # around the draw (NOT_SEEN_BY_A_SAMPLER): of the scheduler, the server. min_tokens, bad_words
    # come as banned_token_ids, structured_outputs, reasoning and allowed_token_ids as a bitmask,
    # prompt_logprobs and the part of them as PromptScoring; logprob_token_ids come with logprobs.
    "n": Change(2),
    "max_tokens": Change(5),
    "min_tokens": Change(3),
    "stop": Change(("a",)),
    "stop_token_ids": Change((1,)),
    "include_stop_str_in_output": Change(True),
    "ignore_eos": Change(True),
    "prompt_logprobs": Change(2),
    "logprob_token_ids": Change((1,)),
    "prompt_logprob_start": Change(4),
    "prompt_logprobs_last_n": Change(4),
    "skip_special_tokens": Change(False),
    "allowed_token_ids": Change((1,)),
    "bad_words": Change(("a",)),
    "structured_outputs": Change(StructuredOutput.of(regex="a+")),
    "thinking_token_budget": Change(3),
    "reasoning": Change(ReasoningTokens(start=1, end=2, is_open=False)),
}


def test_every_sampling_parameter_is_classified() -> None:
    assert set(CHANGES) == {field.name for field in msgspec.structs.fields(SamplingParams)}


def test_samplers_are_compared_over_every_parameter_that_they_read() -> None:
    """tests/fakes/sampling_inputs.py must draw it."""
    plain = SamplingParams()
    drawn = [item.params for item in inputs_for(200, 100, seed=1)]
    varied = {n for n in CHANGES if any(getattr(p, n) != getattr(plain, n) for p in drawn)}
    assert varied == set(CHANGES) - NOT_SEEN_BY_A_SAMPLER


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_parameter_does_to_logits_is_known_to_the_step(name: str) -> None:
    change = CHANGES[name]
    params = SamplingParams(**{"temperature": 0.0, name: change.value})
    item = SampleInput(params, seed=1, position=9, seen=seen_tokens([0, 1], [2]))
    assert getattr(params, name) != getattr(SamplingParams(temperature=0.0), name)
    assert item.changes_logits == change.changes_logits
    needs_no_other = not (change.changes_logits or change.needs_all_logits)
    assert item.is_screenable == (change.is_greedy and needs_no_other)
    drawn = SampleInput(SamplingParams(**{name: change.value}), seed=1, position=9, seen=item.seen)
    assert drawn.asks_for_a_token_alone == needs_no_other
    row = np.array([3.0, 2.0, 1.0, 0.5], np.float32)
    assert np.array_equal(adjusted(row, item), row) == (not change.changes_logits)


def draws(row: np.ndarray, name: str) -> list[int]:
    """Many draws of one row, each at another position."""
    item = SampleInput(SamplingParams(**{name: CHANGES[name].value}), seed=1, position=0)
    items = [msgspec.structs.replace(item, position=position) for position in range(300)]
    return [token_id for token_id, _ in sample(torch.from_numpy(row).expand(300, -1), items)]


@pytest.mark.parametrize(
    "name", [name for name, c in CHANGES.items() if not (c.changes_logits or c.needs_all_logits)]
)
def test_a_draw_that_is_screened_hangs_on_no_logit_that_is_too_small_for_it(name: str) -> None:
    row = np.append(np.linspace(0, 5, 100), -18).astype(np.float32)
    other = np.append(row[:-1], np.float32(-1e6))
    assert draws(row, name) == draws(other, name)


@pytest.mark.parametrize("name", [name for name, c in CHANGES.items() if not c.changes_logits])
def test_a_parameter_that_leaves_tokens_out_is_a_filter(name: str) -> None:
    """Which `SamplingParams.has_filters` must know: otherwise processed logprobs lose it."""
    row = np.array([3.0, 2.0, 1.0, 0.5], np.float32)
    is_filter = len(set(draws(row, name))) < len(row)
    assert SamplingParams(**{name: CHANGES[name].value}).has_filters(len(row)) == is_filter


@pytest.mark.parametrize(
    ("change", "is_screenable"),
    [({"banned_token_ids": (1,)}, False), ({"bitmask": b"\x01"}, True)],  # screening takes masks
)
def test_what_a_step_adds_to_the_parameters_is_known_likewise(
    change: dict[str, Any], is_screenable: bool
) -> None:
    plain = SampleInput(SamplingParams(temperature=0.0), seed=1, position=9)
    assert plain.is_screenable
    item = msgspec.structs.replace(plain, **change)
    assert item.changes_logits
    assert item.is_screenable == is_screenable


def test_a_request_that_keeps_one_token_alone_is_screened_as_a_greedy_one() -> None:
    settings = {"temperature": 1.5, "top_p": 0.7, "min_p": 0.1}
    item = SampleInput(SamplingParams(top_k=1, **settings), seed=3, position=9)
    assert item.is_screenable
    assert not SampleInput(SamplingParams(top_k=2, **settings), seed=3, position=9).is_screenable
    rows = np.random.default_rng(0).normal(size=(50, 40)).astype(np.float32).round(1)  # with ties
    drawn = [token_id for token_id, _ in sample(torch.from_numpy(rows), [item] * 50)]
    assert drawn == rows.argmax(axis=1).tolist()


def test_every_field_of_a_draws_input_is_known_here() -> None:
    """A field that is added may change logits: then `changes_logits` and the test above name it."""
    names = {field.name for field in msgspec.structs.fields(SampleInput)}
    assert names == {"params", "seed", "position", "seen", "banned_token_ids", "bitmask"}
