"""tests/test_llm.py on the card: with --batch-invariant every bit is a lone, cold engine's.

Which runs kernel by kernel, none of which begins before the one before it has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_serve.llm import LLM
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams
from tests.test_llm import (
    LoneServer,
    Subject,
    test_batch_chunks_cache_and_preemption_change_no_bit,
    test_prompt_logprobs_and_penalties_are_exact_too,
)

__all__ = [
    "test_batch_chunks_cache_and_preemption_change_no_bit",
    "test_prompt_logprobs_and_penalties_are_exact_too",
]

pytestmark = pytest.mark.gpu

# Engines stand side by side here: the first must leave room for the next.
KV_BYTES = 16 << 20
EXACT: dict[str, Any] = {
    "device": "cuda",
    "batch_invariant": True,
    "kv_cache_memory_bytes": KV_BYTES,
}
ARITHMETIC: dict[str, dict[str, Any]] = {
    "float32": {**EXACT, "dtype": "float32"},
    "bfloat16": {**EXACT, "dtype": "bfloat16"},
    "bfloat16, eager": {**EXACT, "dtype": "bfloat16", "enforce_eager": True},
}


@pytest.fixture(scope="module", params=ARITHMETIC)
def subject(
    request: pytest.FixtureRequest, model_path: Path, adapter_paths: list[Path]
) -> Iterator[Subject]:
    arithmetic = ARITHMETIC[request.param]
    plain = {**arithmetic, "enforce_eager": True, "overlap_launches": False}
    lone = LoneServer(model_path, adapter_paths, plain)
    yield Subject(model_path, adapter_paths, arithmetic, lone)
    lone.close()


def test_kv_gets_what_the_budget_leaves(model_path: Path) -> None:
    settings = {"device": "cuda", "gpu_memory_utilization": 0.02, "max_num_batched_tokens": 512}
    budget = 0.02 * torch.cuda.get_device_properties(0).total_memory
    with LLM(str(model_path), **settings) as llm:
        assert 0.3 * budget < torch.cuda.memory_allocated() < budget
        (output,) = llm.generate(TokensPrompt((1, 2, 3)), SamplingParams(max_tokens=2))
    assert len(output.outputs[0].token_ids) > 0
