"""The drafters on a real model: every answer is the one without drafts, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_serve.config.speculative import LOOKED_UP
from lora_serve.llm import LLM
from lora_serve.outputs import RequestOutput
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams
from tests.test_llm import bits

NAMES = (None, "a", None, "a", None, None)
PROMPTS = [TokensPrompt((*range(20), *range(40, 42 + 3 * i), *range(12))) for i in range(6)]


BIAS = {7: 6.0, 9: 6.0, 11: 6.0}  # answers in which the same few tokens come again and again


def params(stop: str = "") -> list[SamplingParams]:
    few = {"logit_bias": BIAS, "ignore_eos": True, "max_tokens": 60}
    return [
        SamplingParams(temperature=0.0, logprobs=1, **few),
        SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
        SamplingParams(temperature=0.9, seed=3, **few),
        SamplingParams(temperature=0.7, top_p=0.9, seed=4, frequency_penalty=0.1, **few),
        SamplingParams(temperature=0.0, logprobs=0, stop=(stop,) if stop else (), **few),
        SamplingParams(temperature=0.0, max_tokens=1, n=2),
    ]


def make(model: Path, adapters: list[Path], **settings: object) -> LLM:
    llm = LLM(
        str(model),
        enable_lora=True,
        validate=True,
        cpu_threads=1,
        dtype="float32",
        **settings,
    )
    llm.load_lora_adapter("a", str(adapters[0]))
    return llm


@pytest.fixture(scope="module")
def without(
    model_path: Path, adapter_paths: list[Path]
) -> Iterator[tuple[list[SamplingParams], list[RequestOutput]]]:
    """What is asked, and the answers without drafts; one is stopped by a string of its own."""
    with make(model_path, adapter_paths) as llm:
        text = llm.generate(PROMPTS[4], params()[4])[0].outputs[0].text
        asked = params(stop=text[30:33])
        yield asked, llm.generate(PROMPTS, asked, lora_name=NAMES)


@pytest.mark.parametrize("method", LOOKED_UP)
def test_answers_are_those_without_drafts_to_the_bit(
    method: str,
    model_path: Path,
    adapter_paths: list[Path],
    without: tuple[list[SamplingParams], list[RequestOutput]],
) -> None:
    asked, expected = without
    settings = {"method": method, "num_speculative_tokens": 5, "measure_row_costs": False}
    with make(model_path, adapter_paths, speculative_config=settings) as llm:
        num_accepted = []
        for _ in range(2):
            before = llm.stats()
            found = llm.generate(PROMPTS, asked, lora_name=NAMES)
            assert list(map(bits, found)) == list(map(bits, expected))
            stats = llm.stats()
            num_accepted.append(stats.num_accepted_tokens - before.num_accepted_tokens)
            assert num_accepted[-1] == sum(output.num_accepted_drafts for output in found)
        first, second = num_accepted
        assert first > 20
        if method == "suffix":  # now past answers are drafts, too
            assert second > 2 * first
        assert sum(stats.num_accepted_by_position) == stats.num_accepted_tokens
        assert stats.kv_cache_usage == 0
    assert expected[4].outputs[0].finish_reason == "stop"  # in the middle of accepted drafts


def test_what_one_tenant_was_told_is_no_draft_for_another(
    model_path: Path, adapter_paths: list[Path]
) -> None:
    settings = {
        "method": "suffix",
        "suffix_decoding_max_spec_factor": 2,
        "measure_row_costs": False,
    }
    sampled = SamplingParams(max_tokens=30, temperature=1.5, seed=1, ignore_eos=True)
    with make(model_path, adapter_paths, speculative_config=settings) as llm:

        def num_accepted(salt: str) -> int:
            return llm.generate(PROMPTS[0], sampled, cache_salt=salt)[0].num_accepted_drafts

        first = num_accepted("mine")
        assert num_accepted("another") == first
        assert num_accepted("mine") > first + 10
        llm.reset_prefix_cache()
        assert num_accepted("mine") == first
