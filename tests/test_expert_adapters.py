"""Adapters on experts in an engine: recomputed, from the cache and beside others, as alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from torch import Tensor

from lora_serve.llm import LLM
from lora_serve.ops.select import available_ops
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams
from lora_serve.worker.batch_builder import BatchRows
from lora_serve.worker.step_graphs import StepGraphs
from tests.fakes.peft_adapters import make_peft, save_adapter
from tests.fakes.served_model import save_served_model
from tests.test_llm import bits

pytestmark = pytest.mark.skipif("cpu" not in available_ops(), reason="no native CPU kernels")

FLAGS: dict[str, Any] = {"dtype": "bfloat16", "cpu_threads": 1, "enable_lora": True}
LONE = {"enable_prefix_caching": False, "max_num_seqs": 1, "enforce_eager": True}
FEW_BLOCKS = {"num_gpu_blocks_override": 12, "max_num_batched_tokens": 48}
BOTH = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
ADAPTERS = {
    "both": BOTH | {"r": 4},
    "down": {"target_parameters": ["experts.down_proj"], "target_modules": []},
    "activated": BOTH,
    "attention": {},
}
SHARED = [(11 * i + 7) % 90 for i in range(40)]
NAMES = (None, *ADAPTERS)
PROMPTS = [[*SHARED, 3, 4, *range(10 + i, 14 + 5 * i)] for i in range(len(NAMES))]
PARAMS = SamplingParams(max_tokens=32, temperature=0.0, logprobs=2, ignore_eos=True)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model's, under "", and the adapters'."""
    root = tmp_path_factory.mktemp("experts")
    found = {"": save_served_model(root / "model", "qwen2-moe")}
    for seed, (name, settings) in enumerate(ADAPTERS.items()):
        found[name] = root / name
        save_adapter(make_peft("qwen2-moe", seed, **settings), found[name])
    config = found["activated"] / "adapter_config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"alora_invocation_tokens": [3, 4]})
    )
    return found


def make_llm(paths: dict[str, Path], **settings: Any) -> LLM:
    llm = LLM(str(paths[""]), validate=True, **FLAGS, **settings)
    for name in ADAPTERS:
        llm.load_lora_adapter(name, str(paths[name]))
    return llm


def answers(llm: LLM, indices: range) -> list[object]:
    outputs = llm.generate(
        [TokensPrompt(tuple(PROMPTS[index])) for index in indices],
        PARAMS,
        lora_name=[NAMES[index] for index in indices],
    )
    return [bits(output) for output in outputs]


@pytest.fixture(scope="module")
def right(paths: dict[str, Path]) -> Iterator[list[object]]:
    with make_llm(paths, **LONE) as llm:
        yield [answers(llm, range(index, index + 1))[0] for index in range(len(NAMES))]


def test_all_at_once_answer_as_alone(paths: dict[str, Path], right: list[object]) -> None:
    with make_llm(paths, **FEW_BLOCKS) as llm:
        assert answers(llm, range(len(NAMES))) == right
        assert llm.stats().num_preemptions > 0
        assert answers(llm, range(len(NAMES))) == right
    assert len({repr(answer) for answer in right}) == len(NAMES)


def test_a_recorded_step_would_miss_them(
    paths: dict[str, Path], right: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows when it is recorded which experts its rows will choose."""
    run = StepGraphs.run

    def run_any(self: StepGraphs, rows: BatchRows, pending: Any = None) -> Tensor | None:
        return run(self, replace(rows, experts=()), pending)

    monkeypatch.setattr(StepGraphs, "run", run_any)
    with make_llm(paths) as llm:
        assert answers(llm, range(len(NAMES))) != right
