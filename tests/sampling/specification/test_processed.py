from __future__ import annotations

import numpy as np
import pytest
import torch

from lora_serve.sampling.logprobs_mode import LogprobsMode
from lora_serve.sampling.specification.processed import processed
from lora_serve.sampling.specification.sampler import sample
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import SampleInput
from tests.fakes.sampling_inputs import inputs_for

ROW = np.array([3.0, 2.0, 1.0, 0.5], np.float32)
INF = np.inf


def told(**settings: object) -> list[float]:
    params = SamplingParams(**settings)  # type: ignore[arg-type]
    return processed(ROW, SampleInput(params, seed=1, position=9)).tolist()


@pytest.mark.parametrize(
    ("settings", "row"),
    [
        ({}, [3.0, 2.0, 1.0, 0.5]),
        ({"temperature": 0.0, "top_k": 1}, [3.0, 2.0, 1.0, 0.5]),
        ({"temperature": 0.0, "logit_bias": {3: 4.0}}, [3.0, 2.0, 1.0, 4.5]),
        ({"temperature": 2.0}, [1.5, 1.0, 0.5, 0.25]),
        ({"top_k": 2}, [3.0, 2.0, -INF, -INF]),
        ({"top_k": 4}, [3.0, 2.0, 1.0, 0.5]),
        ({"min_p": 0.3}, [3.0, 2.0, -INF, -INF]),
        ({"top_p": 0.5}, [3.0, -INF, -INF, -INF]),
        ({"top_p": 0.9, "temperature": 0.5}, [6.0, 4.0, -INF, -INF]),
    ],
)
def test_processed_logits_are_those_that_a_token_is_drawn_from(
    settings: dict[str, object], row: list[float]
) -> None:
    assert told(**settings) == row


def test_a_drawn_token_is_never_told_as_impossible() -> None:
    logits = 5 * torch.randn(200, 300, generator=torch.Generator().manual_seed(3))
    inputs = inputs_for(200, 300, seed=4)
    drawn = sample(logits, inputs, LogprobsMode(is_processed=True))
    for row, item, (token_id, logprobs) in zip(logits.numpy(), inputs, drawn, strict=True):
        if logprobs is not None and processed(row, item).max() > -INF:
            assert logprobs.logprob > -INF, token_id


@pytest.mark.parametrize("name", ["raw_logits", "processed_logits"])
def test_modes_of_logits_tell_logits(name: str) -> None:
    item = SampleInput(SamplingParams(temperature=2.0, seed=1, logprobs=4), seed=1, position=9)
    ((_, found),) = sample(torch.tensor(ROW[None]), [item], LogprobsMode.named(name))
    assert found is not None
    factor = 0.5 if name == "processed_logits" else 1.0
    assert [logit for _, logit in found.top] == [factor * x for x in ROW.tolist()]


def test_a_mode_knows_which_rows_it_leaves_as_they_are() -> None:
    mode = LogprobsMode.named("processed_logprobs")
    rows = (4 * torch.randn(300, 50, generator=torch.Generator().manual_seed(1))).numpy()
    for row, item in zip(rows, inputs_for(300, 50, seed=2), strict=True):
        assert mode.changes(item, 50) or np.array_equal(processed(row, item), row)
