"""The whole engine on interpreted Triton kernels: recorded steps that overlap, adapters, cache.

What tests/test_llm.py proves of the CPU's kernels, on fewer and shorter requests. A step takes
most of a second, so that the full table is for `slow` runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lora_serve.llm import LLM
from lora_serve.outputs import EmbeddingOutput
from lora_serve.pooling import PoolingParams
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams
from tests.test_llm import bits

ARITHMETIC: dict[str, Any] = {
    "dtype": "float32",
    "override_op": ("all=triton",),
    "batch_invariant": True,
    "cpu_threads": 1,
    "max_model_len": 128,
    "max_num_batched_tokens": 48,  # every step is recorded, those with prompts in them, too
}
SHARED = [(7 * i) % 90 for i in range(40)]
# (adapter, prompt): the shared prefix is one or two blocks long, and under two adapters.
CASES: list[tuple[str | None, list[int]]] = [
    ("a", [*SHARED, 1]),
    ("b", [*SHARED, 1]),
    ("a", [*SHARED, 1]),
    (None, [*SHARED[:20], 5, 6]),
    ("b", [*SHARED[:35], 9]),
]
NUM_QUICK = 3  # of the cases; the others are for slow runs
GREEDY = SamplingParams(max_tokens=2, temperature=0, logprobs=2, ignore_eos=True)
# What was drawn is liked: a token that the host does not know yet counts, too.
DRAWN = SamplingParams(
    max_tokens=2,
    temperature=1.0,
    top_p=0.9,
    frequency_penalty=-2.0,
    presence_penalty=-2.0,
    seed=3,
    ignore_eos=True,
)
PARAMS = [GREEDY, GREEDY, DRAWN, DRAWN, GREEDY]


def make_llm(model: Path, adapters: list[Path], **settings: Any) -> LLM:
    llm = LLM(str(model), enable_lora=True, validate=True, **{**ARITHMETIC, **settings})
    for name, path in zip("ab", adapters, strict=True):
        llm.load_lora_adapter(name, str(path))
    return llm


def answers(llm: LLM, count: int) -> tuple[list[list[object]], int]:
    """Answers to the first `count` cases, asked at once, and how many tokens were cached."""
    outputs = llm.generate(
        [TokensPrompt(tuple(prompt)) for _, prompt in CASES[:count]],
        PARAMS[:count],
        lora_name=[name for name, _ in CASES[:count]],
    )
    return [bits(output) for output in outputs], sum(o.num_cached_tokens for o in outputs)


class LoneAnswers:
    """What a cold engine without recorded steps answers to each case alone, once it is asked."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._found: dict[int, list[object]] = {}

    def __getitem__(self, case: int) -> list[object]:
        if case not in self._found:
            name, prompt = CASES[case]
            (output,) = self._llm.generate(
                TokensPrompt(tuple(prompt)), PARAMS[case], lora_name=name
            )
            self._found[case] = bits(output)
        return self._found[case]


@pytest.fixture(scope="module")
def expected(model_path: Path, adapter_paths: list[Path]) -> Iterator[LoneAnswers]:
    settings = {"enable_prefix_caching": False, "max_num_seqs": 1, "enforce_eager": True}
    with make_llm(model_path, adapter_paths, **settings) as llm:
        yield LoneAnswers(llm)


def test_company_the_cache_and_recorded_overlapped_steps_change_no_bit(
    expected: LoneAnswers, model_path: Path, adapter_paths: list[Path]
) -> None:
    with make_llm(model_path, adapter_paths, max_num_seqs=3, async_scheduling=True) as llm:
        found, num_cached = answers(llm, NUM_QUICK)
    assert found == [expected[case] for case in range(NUM_QUICK)]
    # The third case arrives with the first, waits for its commit, and finds the prefix.
    assert num_cached == 32


def test_an_adapter_replaced_in_place_never_answers_with_the_old_ones_kv(
    expected: LoneAnswers, model_path: Path, adapter_paths: list[Path]
) -> None:
    prompt = TokensPrompt(tuple(CASES[0][1]))
    with make_llm(model_path, adapter_paths, max_num_seqs=1, enforce_eager=True) as llm:
        for path, answer, num_cached in (
            (adapter_paths[0], expected[0], 0),
            (adapter_paths[1], expected[1], 0),
            (adapter_paths[0], expected[0], 32),
        ):
            llm.load_lora_adapter("b", str(path), load_inplace=True)
            (output,) = llm.generate(prompt, GREEDY, lora_name="b")
            assert output.num_cached_tokens == num_cached
            assert bits(output) == answer


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 5},
        {"max_num_seqs": 3, "max_num_batched_tokens": 13},
        {"max_num_seqs": 4, "num_gpu_blocks_override": 7, "max_loras": 1},
        {"max_num_seqs": 4, "num_gpu_blocks_override": 7, "async_scheduling": True},
        {"max_num_seqs": 4, "enforce_eager": True},
    ],
    ids=["together", "odd chunks", "few blocks", "few blocks, overlapped", "eager"],
)
def test_no_setting_changes_a_bit(
    settings: dict[str, Any],
    expected: LoneAnswers,
    model_path: Path,
    adapter_paths: list[Path],
) -> None:
    with make_llm(model_path, adapter_paths, **settings) as llm:
        alone = [expected[case] for case in range(len(CASES))]
        assert answers(llm, len(CASES))[0] == alone
        warm, num_cached = answers(llm, len(CASES))
    assert warm == alone
    if "num_gpu_blocks_override" not in settings:
        assert num_cached >= 3 * 32


LAST, MEAN = PoolingParams(), PoolingParams(pooling_type="MEAN")


def test_embeddings_are_exact_too(model_path: Path, adapter_paths: list[Path]) -> None:
    prompt = TokensPrompt(tuple(CASES[0][1]))

    def embed(**settings: Any) -> list[EmbeddingOutput]:
        with make_llm(model_path, adapter_paths, enforce_eager=True, **settings) as llm:
            return llm.embed([prompt] * 2, [MEAN, LAST], lora_name="a")

    expected = embed(enable_prefix_caching=False, max_num_seqs=1)
    mean, last = embed(max_num_batched_tokens=24, async_scheduling=True)
    assert [mean.embedding, last.embedding] == [output.embedding for output in expected]
    assert (mean.num_cached_tokens, last.num_cached_tokens) == (0, 32)
