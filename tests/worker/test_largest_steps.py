from __future__ import annotations

import msgspec
import pytest

from lora_serve.model_info import Vocabulary
from lora_serve.sampling_params import MAX_BAD_WORDS, MAX_LOGIT_BIASES, SamplingParams
from lora_serve.worker.largest_steps import (
    StepLimits,
    largest_adapter,
    largest_sample,
    largest_steps,
)
from tests.fakes.checkpoints import whole_checkpoint
from tests.fakes.sampling_inputs import NOT_SEEN_BY_A_SAMPLER

TAKES_LESS = {"logprob_token_ids"}  # than the most likely ones, in whose place they stand


def limits(**changes: int) -> StepLimits:
    settings = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 100,
        "max_model_len": 1000,
        "max_logprobs": 20,
        "vocab_size": 5000,
        "block_size": 16,
    }
    return StepLimits(**settings | changes)


@pytest.mark.parametrize(
    ("num_seqs", "tokens", "longest", "lengths"),
    [(4, 100, 1000, [100]), (4, 100, 40, [40, 40, 20]), (2, 100, 40, [40, 40]), (9, 3, 40, [3])],
)
def test_prompts_fill_the_token_budget_or_all_places(
    num_seqs: int, tokens: int, longest: int, lengths: list[int]
) -> None:
    asked = limits(max_num_seqs=num_seqs, max_num_batched_tokens=tokens, max_model_len=longest)
    prompts, decodes, one = largest_steps(asked)
    assert [request.num_tokens for request in prompts] == lengths
    assert [request.num_tokens for request in decodes] == [1] * min(num_seqs, tokens)
    assert {request.end for request in decodes} == {longest}
    assert one == decodes[:1]
    for request in (*prompts, *decodes):
        (block_ids,) = request.block_tables
        assert set(block_ids) == {0}
        assert len(block_ids) == -(-request.end // 16)
        (sample,) = request.asked.samples
        assert sample.params.has_penalties  # for which logits are copied


def test_the_largest_adapter_has_all_that_adapters_may_have() -> None:
    """But biases: they are added in place, in steps that no graph is recorded of."""
    vocabulary = Vocabulary("embed", "head", size=100, hidden_size=8, is_tied=False)
    adapter = largest_adapter({"q": (8, 8), "embed": (8, 100)}, 4, vocabulary)
    assert set(adapter.tensor_fields) == set(whole_checkpoint().tensor_fields) - {"biases"}


def test_every_sampling_parameter_that_a_step_sees_is_asked_for() -> None:
    """One that is new is asked for, too, or named above."""
    params = largest_sample(limits()).params
    for field in msgspec.structs.fields(SamplingParams):
        is_asked = getattr(params, field.name) != getattr(SamplingParams(), field.name)
        assert is_asked == (field.name not in NOT_SEEN_BY_A_SAMPLER | TAKES_LESS), field.name


@pytest.mark.parametrize(("vocab_size", "longest"), [(5000, 1000), (300, 1000), (5000, 9000)])
def test_a_sample_asks_for_as_much_as_a_request_may(vocab_size: int, longest: int) -> None:
    sample = largest_sample(limits(vocab_size=vocab_size, max_model_len=longest))
    assert len(sample.params.logit_bias) == min(MAX_LOGIT_BIASES, vocab_size)
    assert len(sample.banned_token_ids) == MAX_BAD_WORDS
    assert len(set(sample.seen.token_ids)) == min(longest, vocab_size)
    assert len(sample.seen.num_drawn) == len(sample.seen.token_ids)
    assert sample.bitmask is not None
    assert 8 * len(sample.bitmask) >= vocab_size
    for ids in (sample.params.logit_bias, sample.banned_token_ids, sample.seen.token_ids):
        assert max(ids) < vocab_size


@pytest.mark.parametrize(("max_logprobs", "num_top"), [(20, 20), (0, 0), (9999, 5000), (-1, 5000)])
def test_logprobs_are_as_many_as_the_server_allows(max_logprobs: int, num_top: int) -> None:
    prompts, _, _ = largest_steps(limits(max_logprobs=max_logprobs))
    scoring = prompts[0].asked.scoring
    assert scoring is not None
    assert scoring.num_top == num_top
    assert len(scoring.target_ids) == 100
    assert prompts[0].asked.samples[0].params.logprobs == num_top


def test_prompt_logprobs_of_a_large_vocabulary_are_of_as_many_rows_as_an_answer_has() -> None:
    prompts, _, _ = largest_steps(limits(max_logprobs=-1, vocab_size=151_936))
    scoring = prompts[0].asked.scoring
    assert scoring is not None
    assert len(scoring.target_ids) == 3
