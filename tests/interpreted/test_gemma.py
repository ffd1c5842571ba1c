"""A Gemma on interpreted Triton kernels: caps, windows by layer, scaled rows, recorded steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lora_serve.llm import LLM
from lora_serve.prompts import TokensPrompt
from tests.fakes.peft_adapters import make_peft
from tests.fakes.served_model import save_served_model
from tests.fakes.tiny_models import GEMMA_TWO_LAYERS
from tests.interpreted.test_engine import DRAWN, GREEDY, SHARED, make_llm
from tests.test_llm import bits

PROMPT = TokensPrompt((*SHARED, 1))  # twice as long as the window


@pytest.fixture(autouse=True)
def silent_overflow() -> Iterator[None]:
    """Keep numpy, which interprets, silent as a card: gelu takes 1 / (1 + e^x) of large x."""
    with np.errstate(over="ignore"):
        yield


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_served_model(tmp_path_factory.mktemp("gemma") / "model", GEMMA_TWO_LAYERS)


@pytest.mark.slow  # most of a minute; tests/interpreted/test_engine.py has one of a Qwen
def test_the_answers_are_those_of_a_lone_cold_engine(gemma: Path, tmp_path: Path) -> None:
    """Both with one adapter: the second waits for the first one's commit, and finds the prefix."""
    adapters = [tmp_path / name for name in "ab"]
    for seed, path in enumerate(adapters):
        make_peft(GEMMA_TWO_LAYERS, seed, r=(4, 13)[seed]).save_pretrained(str(path))
    params = [GREEDY, DRAWN]
    lone = {"enable_prefix_caching": False, "max_num_seqs": 1, "enforce_eager": True}
    with make_llm(gemma, adapters, **lone) as llm:
        expected = [bits(llm.generate(PROMPT, each, lora_name="b")[0]) for each in params]
    with make_llm(gemma, adapters, max_num_seqs=2, async_scheduling=True) as llm:
        found = llm.generate([PROMPT] * 2, params, lora_name=["b"] * 2)
    assert [bits(output) for output in found] == expected
    assert [output.num_cached_tokens for output in found] == [0, 32]


def test_greedy_tokens_are_those_of_the_reference(gemma: Path) -> None:
    flags = {"dtype": "float32", "max_model_len": 128, "cpu_threads": 1, "enforce_eager": True}
    tokens = []
    for override in ("all=triton", "all=reference"):
        with LLM(str(gemma), override_op=(override,), **flags) as llm:
            (output,) = llm.generate(PROMPT, GREEDY)
            tokens.append(output.outputs[0].token_ids)
    assert tokens[0] == tokens[1]
