"""Exactness over KV tiers on a real model: what one engine stored, the next loads, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lora_serve.llm import LLM
from lora_serve.outputs import RequestOutput
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams
from tests.fakes.peft_adapters import make_peft
from tests.fakes.served_model import save_served_model
from tests.fakes.threads import one_thread
from tests.test_llm import bits

__all__ = ["one_thread"]

PARAMS = SamplingParams(temperature=0, max_tokens=24, logprobs=3, ignore_eos=True)
PROMPTS = [
    TokensPrompt(tuple((11 * i + length) % 90 for i in range(length))) for length in (40, 150, 201)
]
NUM_FULL = sum((len(prompt.token_ids) - 1) // 16 * 16 for prompt in PROMPTS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_served_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    first, second = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")
    for seed, path in enumerate((first, second)):
        make_peft("qwen2", seed=seed).save_pretrained(path)
    return first, second


def answer(llm: LLM, lora_name: str | None = None) -> list[RequestOutput]:
    return llm.generate(PROMPTS, PARAMS, lora_name=lora_name)


def start(model: Path, **settings: Any) -> LLM:
    return LLM(str(model), enable_lora=True, kv_load_deadline_ms=60_000, **settings)


@pytest.fixture(scope="module")
def cold(model: Path, adapters: tuple[Path, Path]) -> Iterator[LLM]:
    with start(model, enable_prefix_caching=False) as llm:
        for name, path in zip("ab", adapters, strict=True):
            llm.load_lora_adapter(name, str(path))
        yield llm


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("arithmetic", [{"dtype": "float32"}, {"dtype": "bfloat16"}])
def test_a_restarted_engine_answers_from_disk_what_a_cold_one_answers(
    model: Path, tmp_path: Path, arithmetic: dict[str, Any], enable_prefix_caching: bool
) -> None:
    settings = {**arithmetic, "enable_prefix_caching": enable_prefix_caching}
    with start(model, **settings) as llm:
        expected = [bits(output) for output in answer(llm)]
    for is_warm in (False, True):
        with start(model, kv_disk_path=str(tmp_path), **settings) as llm:
            outputs = answer(llm)
            assert [bits(output) for output in outputs] == expected
            found = sum(output.num_cached_by_tier["disk"] for output in outputs)
            # While cold, the longer prompts may find on disk what the shorter stored just now.
            assert found == NUM_FULL if is_warm else found <= NUM_FULL / 2


def test_an_adapter_retrained_in_place_between_two_starts_finds_none_of_the_old_kv(
    model: Path, cold: LLM, adapters: tuple[Path, Path], tmp_path: Path
) -> None:
    expected = {name: [bits(output) for output in answer(cold, name)] for name in "ab"}
    assert expected["a"] != expected["b"]
    place = tmp_path / "adapter"
    for name, path, is_warm in (("a", 0, False), ("b", 1, False), ("a", 0, True), ("b", 1, True)):
        place.unlink(missing_ok=True)
        place.symlink_to(adapters[path])
        with start(model, kv_disk_path=str(tmp_path / "kv"), enable_prefix_caching=False) as llm:
            llm.load_lora_adapter("tenant", str(place))
            outputs = answer(llm, "tenant")
            assert [bits(output) for output in outputs] == expected[name]
            found = sum(output.num_cached_by_tier["disk"] for output in outputs)
            assert found == (NUM_FULL if is_warm else 0)


def test_kv_that_left_the_device_cache_comes_back_from_memory(model: Path, cold: LLM) -> None:
    expected = [bits(output) for output in answer(cold)]
    with start(model, kv_ram_bytes=2**26, num_gpu_blocks_override=16) as llm:
        answer(llm)
        outputs = answer(llm)
        assert [bits(output) for output in outputs] == expected
        found = sum(output.num_cached_by_tier["ram"] for output in outputs)
        assert found > NUM_FULL / 4
        stats = llm.stats()
        assert stats.external_cache_hits >= found
        assert stats.kv_tiers[0].tier == "ram"
