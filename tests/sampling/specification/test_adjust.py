from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import RepetitionPenaltyLogitsProcessor

from lora_serve.sampling.specification.adjust import adjusted
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import SampleInput
from tests.fakes.seen_tokens import seen_tokens


def row_of(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def item(
    params: SamplingParams,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
    banned: tuple[int, ...] = (),
) -> SampleInput:
    return SampleInput(params, 0, 0, seen_tokens(prompt, output), banned)


def test_a_request_that_wants_no_change_gets_the_very_row() -> None:
    row = row_of(1, 2, 3)
    assert adjusted(row, item(SamplingParams())) is row


def test_the_models_row_is_never_changed() -> None:
    row = row_of(1, 2, 3)
    adjusted(row, item(SamplingParams(logit_bias={0: 5.0}, presence_penalty=1.0), banned=(1,)))
    assert row.tolist() == [1, 2, 3]


def test_a_banned_token_stays_banned_whatever_its_bias() -> None:
    row = adjusted(row_of(1, 2), item(SamplingParams(logit_bias={1: 100.0}), banned=(1,)))
    assert row.tolist() == [1, -np.inf]


def test_only_tokens_whose_bit_is_set_stay_whatever_their_bias() -> None:
    """Bits go from the lowest of the first byte on; where there is no byte, nothing is allowed."""
    row = row_of(*range(20))
    asking = replace(item(SamplingParams(logit_bias={2: 9.0})), bitmask=bytes([0b00000011, 0b1]))
    assert np.flatnonzero(adjusted(row, asking) > -np.inf).tolist() == [0, 1, 8]
    assert np.all(adjusted(row, replace(asking, bitmask=b"")) == -np.inf)
    assert adjusted(row, replace(asking, bitmask=b"\xff" * 9))[19] == 19


def test_logit_bias_is_added() -> None:
    row = adjusted(row_of(1, 2, 3), item(SamplingParams(logit_bias={0: 2.5, 2: -100.0})))
    assert row.tolist() == [3.5, 2, -97]


def test_repetition_penalty_is_that_of_transformers_over_prompt_and_output() -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    seen = (3, 7, 3, 49, 11)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([seen]), logits.clone())
    row = adjusted(
        logits[0].numpy(), item(SamplingParams(repetition_penalty=1.3), seen[:2], seen[2:])
    )
    np.testing.assert_allclose(row, expected[0].numpy(), rtol=1e-6)


def test_frequency_counts_and_presence_does_not_and_both_ignore_the_prompt() -> None:
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=0.25)
    row = adjusted(row_of(0, 0, 0, 0), item(params, prompt=(0, 1), output=(1, 2, 2, 2)))
    assert row.tolist() == [0, -0.75, -1.75, 0]


def test_repetition_comes_before_frequency_and_after_bias() -> None:
    params = SamplingParams(
        logit_bias={0: 1.0}, repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=0.5
    )
    row = adjusted(row_of(3, 5), item(params, output=(0, 0)))
    assert row.tolist() == [(3 + 1) / 2 - 2 * 1 - 0.5, 5]


@pytest.mark.parametrize("token_id", [-1, 2, 10**9])
def test_ids_that_the_model_lacks_change_nothing(token_id: int) -> None:
    params = SamplingParams(logit_bias={token_id: 5.0}, repetition_penalty=2.0)
    ids = (token_id,)
    assert adjusted(row_of(1, 2), item(params, ids, ids, ids)).tolist() == [1, 2]
