"""What a whole step costs that decodes one token of one request, counted in calls of functions.

Calls are the same on every machine. What lies in them and computes is no part of this.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from lora_serve.adapters.loader import AdapterLoader, LoadResult
from lora_serve.engine.core.build import build_engine_core
from lora_serve.engine.core.core import EngineCore
from lora_serve.engine.core.executor import make_executor
from lora_serve.engine.settings import engine_config
from lora_serve.generate_request import GenerateRequest
from lora_serve.messages import EngineRequest
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams
from tests.fakes.python_calls import python_calls
from tests.fakes.served_model import save_served_model

NUM_STEPS = 32  # of which two fill a block
LIMIT = 162  # 157 are called


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_served_model(tmp_path_factory.mktemp("served") / "model")


def calls_of_a_step(model: Path) -> float:
    """Calls of Python functions, with all that the API process is told."""
    config = engine_config(model=str(model), device="cpu", num_gpu_blocks_override=64)
    executor = make_executor(config)
    core = build_engine_core(config, executor, executor.load(), lambda: None)
    with closing(core):
        params = SamplingParams(max_tokens=2 * NUM_STEPS, seed=0, ignore_eos=True)
        request = GenerateRequest(request_id="r", prompt=TokensPrompt((1, 2, 3)), params=params)
        core.handle(EngineRequest(request))
        for _ in range(NUM_STEPS // 2):
            _step(core)
        with python_calls() as calls:
            for _ in range(NUM_STEPS):
                _step(core)
        return calls.num / NUM_STEPS


def _step(core: EngineCore) -> None:
    assert core.step()
    core.take_replies()


def test_what_a_step_does_not_use_costs_it_no_calls(model: Path) -> None:
    assert calls_of_a_step(model) < LIMIT


def test_a_part_that_looks_for_work_where_there_is_none_is_noticed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_results = AdapterLoader.take_results

    def looking_everywhere(loader: AdapterLoader) -> list[LoadResult]:
        loader._give_up_overdue()
        loader._start_reads()
        assert loader.next_due is None
        return take_results(loader)

    monkeypatch.setattr(AdapterLoader, "take_results", looking_everywhere)
    assert calls_of_a_step(model) >= LIMIT
