"""Exactness where layers see a window, and free the blocks that no later token sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lora_serve.errors import PromptTooLongError
from lora_serve.llm import LLM
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams
from tests.fakes.served_model import save_served_model
from tests.fakes.threads import one_thread
from tests.test_llm import bits, prompts_with_shared_prefixes

__all__ = ["one_thread"]

# Windows in all layers, in the last two of three, and in the first two of three.
FAMILIES = ("mistral", "qwen2-windows", "gemma2", "gemma3")
NUM_ANSWERED = 60
PARAMS = [
    SamplingParams(max_tokens=NUM_ANSWERED, temperature=i % 2, seed=i, logprobs=3, ignore_eos=True)
    for i in range(8)
]
PROMPTS = prompts_with_shared_prefixes(len(PARAMS))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: save_served_model(tmp_path_factory.mktemp(name), name) for name in FAMILIES}


@pytest.fixture(scope="module")
def lone_answers(models: dict[str, Path]) -> dict[str, list[list[object]]]:
    """What cold engines with room for all answer each request alone, its prompt in one piece."""
    answers = {}
    for name, path in models.items():
        with LLM(str(path), enable_prefix_caching=False, max_num_seqs=1) as llm:
            answers[name] = [bits(output) for output in llm.generate(PROMPTS, PARAMS)]
    return answers


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 23, "async_scheduling": True},
        {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 36},
        {"max_num_batched_tokens": 30, "num_gpu_blocks_override": 40, "async_scheduling": True},
    ],
    ids=["whole prompts", "odd chunks, overlapped", "preempting", "preempting, overlapped"],
)
def test_company_chunks_cache_and_preemption_change_no_bit(
    models: dict[str, Path],
    lone_answers: dict[str, list[list[object]]],
    name: str,
    settings: dict[str, Any],
) -> None:
    with LLM(str(models[name]), validate=True, **settings) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, PARAMS)
            assert [bits(output) for output in outputs] == lone_answers[name]
        if not settings:
            assert sum(output.num_cached_tokens for output in outputs) > 300
        if "num_gpu_blocks_override" in settings and name != "mistral":
            assert llm.stats().num_preemptions > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_what_one_engine_stored_the_next_one_loads(
    models: dict[str, Path],
    lone_answers: dict[str, list[list[object]]],
    name: str,
    tmp_path: Path,
) -> None:
    for is_warm in (False, True):
        tiers = {"kv_disk_path": str(tmp_path), "kv_load_deadline_ms": 60_000}
        with LLM(
            str(models[name]), max_num_batched_tokens=40, enable_prefix_caching=False, **tiers
        ) as llm:
            outputs = llm.generate(PROMPTS, PARAMS)
            assert [bits(output) for output in outputs] == lone_answers[name]
            found = sum(output.num_cached_by_tier["disk"] for output in outputs)
            assert found > 200 or not is_warm


def test_a_long_answer_needs_a_window_of_blocks_alone(models: dict[str, Path]) -> None:
    prompt = TokensPrompt(tuple(7 * i % 90 for i in range(50)))
    params = SamplingParams(max_tokens=500, temperature=0, logprobs=1, ignore_eos=True)
    with LLM(str(models["mistral"]), enable_prefix_caching=False) as llm:
        (expected,) = llm.generate(prompt, params)
    # 64 tokens in all, of 550.
    with LLM(str(models["mistral"]), num_gpu_blocks_override=4, max_num_batched_tokens=16) as llm:
        (output,) = llm.generate(prompt, params)
        assert llm.stats().num_preemptions == 0
    assert bits(output) == bits(expected)


def test_a_full_layer_still_needs_all_blocks(models: dict[str, Path]) -> None:
    with (
        LLM(str(models["gemma3"]), num_gpu_blocks_override=20) as llm,
        pytest.raises(PromptTooLongError, match=r"KV cache holds \d+ tokens"),
    ):
        llm.generate(TokensPrompt((1,) * 200), SamplingParams(max_tokens=100))
