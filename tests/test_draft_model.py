"""A draft model on real weights: every answer is the one without, to the bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from lora_serve.llm import LLM
from lora_serve.ops.cpu.threads import default_num_threads
from lora_serve.outputs import RequestOutput
from lora_serve.sampling_params import SamplingParams
from lora_serve.structured_outputs import StructuredOutput
from tests.fakes.served_model import save_served_model
from tests.test_drafts import NAMES, make_llm, params_of, prompts
from tests.test_llm import bits

Answered = tuple[list[SamplingParams], list[RequestOutput]]

FORM = "(red|green): once more [a-f]{4,30} end"
OF_TWO_RANKS = pytest.param(
    {"tensor_parallel_size": 2},
    marks=pytest.mark.skipif(default_num_threads() < 2, reason="two ranks need two cores"),
    id="two ranks",
)
TIGHT = {"num_gpu_blocks_override": 14, "max_num_batched_tokens": 64}


def answers(model: Path, adapters: list[Path], asked: list[SamplingParams], **settings: Any) -> Any:
    """The answers, and the engine's stats when they are there."""
    with make_llm(model, adapters, cpu_threads=1, **settings) as llm:
        names = [NAMES[index % len(NAMES)] for index in range(len(asked))]
        return llm.generate(prompts(len(asked)), asked, lora_name=names), llm.stats()


@pytest.fixture(scope="module")
def without(model_path: Path, adapter_paths: list[Path]) -> Answered:
    with make_llm(model_path, adapter_paths, cpu_threads=1) as llm:
        asked = params_of(llm)
    return asked, answers(model_path, adapter_paths, asked)[0]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain"),
        pytest.param(TIGHT, id="preempting"),
        pytest.param({"async_scheduling": True}, id="overlapped"),
        pytest.param({"override_op": ("all=reference",)}, id="reference"),
        OF_TWO_RANKS,
    ],
)
def test_a_draft_model_changes_no_bit(
    settings: dict[str, Any], model_path: Path, adapter_paths: list[Path], without: Answered
) -> None:
    asked, expected = without
    speculative = {
        "model": str(model_path),
        "num_speculative_tokens": 4,
        "max_step_rows": 32,
        "measure_row_costs": False,
    }
    if "override_op" in settings:
        expected = answers(model_path, adapter_paths, asked, **settings)[0]
    found, stats = answers(
        model_path, adapter_paths, asked, speculative_config=speculative, **settings
    )
    assert list(map(bits, found)) == list(map(bits, expected))
    assert stats.num_accepted_tokens > 5
    assert stats.num_accepted_tokens < stats.num_draft_tokens  # others' draws it cannot foresee
    assert (stats.num_preemptions > 0) == (settings == TIGHT)


@pytest.mark.parametrize("settings", [pytest.param({}, id="one rank"), OF_TWO_RANKS])
def test_a_draft_model_changes_no_bit_of_answers_that_must_match(
    settings: dict[str, Any], model_path: Path, adapter_paths: list[Path], without: Answered
) -> None:
    """Their forced tokens are drafted beside what the model guesses for the others."""
    asked = [
        replace(each, structured_outputs=StructuredOutput.of(regex=FORM), stop_token_ids=())
        if index % 2
        else each
        for index, each in enumerate(without[0])
    ]
    held = slice(1, None, 2)
    speculative = {
        "model": str(model_path),
        "num_speculative_tokens": 4,
        "max_step_rows": 32,
        "measure_row_costs": False,
    }
    expected = answers(model_path, adapter_paths, asked, speculation="off")[0]
    found, stats = answers(
        model_path, adapter_paths, asked, speculative_config=speculative, **settings
    )
    assert list(map(bits, found)) == list(map(bits, expected))
    assert any(re.fullmatch(FORM, output.outputs[0].text) for output in found[held])
    num_forced = sum(output.num_accepted_drafts for output in found[held])
    assert num_forced > 20
    assert stats.num_accepted_tokens > num_forced + 5, "and guesses for the others"


def test_of_greedy_answers_a_model_that_drafts_for_itself_guesses_every_token(
    model_path: Path,
) -> None:
    """It would not, if it went on from KV of rejected guesses, or of another text."""
    greedy = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    settings = {"model": str(model_path), "num_speculative_tokens": 4, "measure_row_costs": False}
    with LLM(str(model_path), cpu_threads=1, speculative_config=settings) as llm:
        outputs = llm.generate(prompts(3), greedy)
        stats = llm.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens
    assert [output.num_accepted_drafts for output in outputs] == [39, 39, 39]


def test_a_quantised_model_of_another_family_may_guess(tmp_path: Path, model_path: Path) -> None:
    other = save_served_model(tmp_path / "other", "gemma2")  # its layers are of two groups
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    settings = {
        "model": str(other),
        "quantization": "int8",
        "num_speculative_tokens": 2,
        "measure_row_costs": False,
    }
    with LLM(str(model_path), cpu_threads=1) as llm:
        expected = llm.generate(prompts(2), greedy)
    with LLM(str(model_path), cpu_threads=1, speculative_config=settings) as llm:
        found = llm.generate(prompts(2), greedy)
        assert llm.stats().num_draft_tokens > llm.stats().num_accepted_tokens
    assert list(map(bits, found)) == list(map(bits, expected))
