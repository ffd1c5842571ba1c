"""Ranks as processes of their own, up to four: all that an engine does has the bits of one rank.

Four of one thread each run on any machine, two by two where it has two cores.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lora_serve.llm import LLM
from lora_serve.ops.select import available_ops
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams
from lora_serve.worker import rank_cards
from tests.e2e.processes import pids_below
from tests.fakes.peft_adapters import make_peft, save_adapter
from tests.fakes.served_model import save_served_model
from tests.fakes.threads import one_thread
from tests.fakes.tiny_models import FOUR_KV_HEADS
from tests.test_llm import bits

__all__ = ["one_thread"]

pytestmark = pytest.mark.skipif("cpu" not in available_ops(), reason="no native CPU kernels")

GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=3, ignore_eos=True)
SEEDED = SamplingParams(seed=7, temperature=0.9, top_p=0.9, max_tokens=12, logprobs=3, n=2)
PROMPTS = [
    TokensPrompt(tuple((11 * i + length) % 90 for i in range(length))) for length in (40, 70, 101)
]
PARAMS = [GREEDY, SEEDED, GREEDY]
NUM_FULL = sum((len(prompt.token_ids) - 1) // 16 * 16 for prompt in PROMPTS)


def computed(llm: LLM, adapters: list[Path], salt: str) -> list[list[object]]:
    """Answers of the base model, of an adapter, and of the one that replaces it. salt: a new one.

    So no KV of another engine is found.
    """
    outputs = llm.generate(PROMPTS, PARAMS, cache_salt=salt)
    for turn, adapter in enumerate(adapters):
        llm.load_lora_adapter("tenant", str(adapter), load_inplace=True)
        names = ["tenant", None, "tenant"]
        outputs += llm.generate(PROMPTS, PARAMS, lora_name=names, cache_salt=f"{salt}, {turn}")
    assert not any(output.num_cached_by_tier.get("disk") for output in outputs)
    return [bits(output) for output in outputs]


def loaded(llm: LLM) -> tuple[list[list[object]], int]:
    """Answers for which KV is taken from the disk, and of how many tokens it was."""
    outputs = llm.generate(PROMPTS, PARAMS)
    found = sum(output.num_cached_by_tier["disk"] for output in outputs)
    return [bits(output) for output in outputs], found


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        pytest.param(FOUR_KV_HEADS, (2, 1, 4), id="a KV head for each of four"),
        pytest.param("qwen2", (4, 1), id="two of four keep the same KV head"),
    ],
)
def test_processes_give_the_bits_of_one(
    family: str, sizes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And read the KV that the first of them has stored, whatever their number."""
    monkeypatch.setattr(rank_cards, "check_cores", lambda parallel: None)
    model = save_served_model(tmp_path / "model", family)
    adapters = [tmp_path / "a", tmp_path / "b"]
    for seed, path in enumerate(adapters):
        save_adapter(make_peft(family, seed), path)
    settings: dict[str, Any] = {
        "enable_lora": True,
        "cpu_threads": 1,
        "dtype": "bfloat16",
        "num_gpu_blocks_override": 64,
        "enable_prefix_caching": False,
        "kv_disk_path": str(tmp_path / "kv"),
        "kv_load_deadline_ms": 60_000,
    }
    answers, taken = [], []
    for size in sizes:
        with LLM(str(model), tensor_parallel_size=size, **settings) as llm:
            assert len(pids_below(os.getpid(), b"rank_process")) == size - 1
            answers.append(computed(llm, adapters, salt=f"of {size}"))
            taken.append(loaded(llm))
        assert not pids_below(os.getpid(), b"rank_process")
    base, tenant, replaced = answers[0][0], answers[0][3], answers[0][6]
    assert base != tenant != replaced != base
    assert answers == answers[:1] * len(sizes)
    first, *others = taken
    assert first == (answers[0][:3], 0)
    assert others == [(answers[0][:3], NUM_FULL)] * len(others)
