"""Drafts on real models: whatever is drafted, answers are those without drafts, to the bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from lora_serve.llm import LLM
from lora_serve.ops.select import available_ops
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams
from lora_serve.scheduler.request import Request
from tests.fakes.drafting import drafting, some_drafts
from tests.test_llm import bits

VOCAB_SIZE = 90  # of drafts that are made up
NAMES = (None, "a", "b")
BACKENDS = pytest.mark.parametrize("backend", available_ops())

MANY_DRAFTS = {
    "speculative_config": {"method": "ngram", "max_step_rows": 64, "measure_row_costs": False}
}

ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "logprobs": 0},
    {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.4, "logprobs": 2},
    {"temperature": 1.0, "repetition_penalty": 1.5, "logit_bias": {7: 3.0}},
    {"temperature": 1.0, "prompt_logprobs": 1, "max_tokens": 1},
    {"temperature": 0.0, "max_tokens": 7, "prompt_logprobs": 0},
)


def prompts(count: int) -> list[TokensPrompt]:
    """Prompts with a prefix in common, each of another length."""
    return [TokensPrompt((*range(20), *range(40, 42 + 3 * index))) for index in range(count)]


def params_of(llm: LLM) -> list[SamplingParams]:
    """What ASKED says, and stop tokens in the middle of an answer, which min_tokens holds off."""
    plain = [
        SamplingParams(**{"max_tokens": 40, "seed": seed, "ignore_eos": True, **asked})
        for seed, asked in enumerate(ASKED)
    ]
    stopping = SamplingParams(max_tokens=24, temperature=1.0, seed=100, ignore_eos=True)
    (answer,) = llm.generate(prompts(len(ASKED) + 1)[-1], stopping)
    drawn = answer.outputs[0].token_ids
    stops = {"stop_token_ids": (drawn[5], drawn[9]), "max_tokens": 24, "ignore_eos": True}
    return [
        *plain,
        SamplingParams(temperature=1.0, seed=100, **stops),
        SamplingParams(temperature=1.0, seed=101, min_tokens=8, logprobs=1, **stops),
        SamplingParams(temperature=0.0, seed=102, min_tokens=3, presence_penalty=1.0, **stops),
    ]


def make_llm(model: Path, adapters: list[Path], **settings: Any) -> LLM:
    llm = LLM(str(model), enable_lora=True, validate=True, dtype="float32", **settings)
    for name, path in zip(NAMES[1:], adapters, strict=False):
        llm.load_lora_adapter(str(name), str(path))
    return llm


@BACKENDS
@pytest.mark.parametrize(
    "settings",
    [{}, {"num_gpu_blocks_override": 14, "max_num_batched_tokens": 64}, {"async_scheduling": True}],
    ids=["plain", "preempting", "overlapped"],
)
def test_drafts_change_no_bit(
    model_path: Path, adapter_paths: list[Path], backend: str, settings: dict[str, Any]
) -> None:
    arithmetic = {"override_op": (f"all={backend}",), "cpu_threads": 1}
    with make_llm(model_path, adapter_paths, **arithmetic) as llm:
        params = params_of(llm)
        asked = prompts(len(params))
        names = [NAMES[index % len(NAMES)] for index in range(len(params))]
        expected = llm.generate(asked, params, lora_name=names)
    answers = {
        each.seed: output.outputs[0].token_ids
        for each, output in zip(params, expected, strict=True)
    }
    rng = random.Random(5)

    def drafts(request: Request) -> list[int]:
        return some_drafts(answers[request.seed][request.num_output_tokens :], VOCAB_SIZE, rng)

    with (
        drafting(drafts) as counts,
        make_llm(model_path, adapter_paths, **arithmetic, **settings, **MANY_DRAFTS) as llm,
    ):
        found = llm.generate(asked, params, lora_name=names)
    assert list(map(bits, found)) == list(map(bits, expected))
    assert counts.num_accepted > 30
    assert counts.num_rejected > 30
    assert {output.outputs[0].finish_reason for output in expected} == {"stop", "length"}
