"""The small models that the fuzzer plays on beside the demo's, and faults of them that it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lora_serve.cli.main import main
from lora_serve.config import EngineConfig, ModelConfig
from lora_serve.config.model import AUTO
from lora_serve.demo.model import DemoPaths
from lora_serve.fuzz.fuzzer import Fuzzer
from lora_serve.fuzz.generate import Scope, make_trace
from lora_serve.fuzz.reference import ColdEngine
from lora_serve.fuzz.runners import TraceRun
from lora_serve.fuzz.small_models import TURN, drawn_model, write_gptq, write_moe
from lora_serve.fuzz.trace import Load, Trace, save_trace
from lora_serve.fuzz.versions import write_extended, write_versions
from lora_serve.layers.expert_lora import ExpertDeltas
from lora_serve.layers.experts import ExpertsMLP
from lora_serve.models.base import lora_modules
from lora_serve.models.source import load_spec
from lora_serve.models.weights import open_weights
from tests.fakes.lone_runner import LoneRunner


@pytest.fixture(scope="module")
def demo(model_path: Path, adapter_paths: list[Path]) -> DemoPaths:
    return DemoPaths(model_path, *adapter_paths[:2])


def test_eight_traces_in_a_row_have_each_model() -> None:
    drawn = [drawn_model(seed) for seed in range(100, 100 + TURN)]
    assert sorted(drawn) == [*[""] * 6, "gptq", "moe"]


def test_codes_of_gptq_are_the_weights_within_half_a_step(demo: DemoPaths, tmp_path: Path) -> None:
    model = write_gptq(demo, tmp_path).model
    spec = load_spec(model)
    stored, own = (open_weights(each, spec, AUTO, 0, torch.float32) for each in (model, demo.model))
    kinds = set[bool]()
    for name in (name for name in spec.tensor_shapes() if name.endswith("_proj.weight")):
        codes = stored.read_codes(name)
        assert codes is not None
        kinds.add(codes.offsets is None)
        step = codes.scales.repeat_interleave(codes.format.group, 1)
        assert ((stored.read(name) - own.read(name).float()).abs() <= 1.01 * step).all()
    assert kinds == {True, False}


@dataclass
class FaultyRunner(LoneRunner):
    """Answers alone, while something is wrong with the model."""

    spoil: Callable[[pytest.MonkeyPatch], None] = lambda patch: None

    def play(self, trace: Trace) -> TraceRun:
        with pytest.MonkeyPatch.context() as patch:
            self.spoil(patch)
            return super().play(trace)


def no_lora_on_experts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ExpertDeltas, "add", lambda *_: None)


def experts_of_the_row_before(patch: pytest.MonkeyPatch) -> None:
    compute = ExpertsMLP.__call__

    def mixed_up(self: ExpertsMLP, x: Tensor, rows: object) -> Tensor:
        return compute(self, x.roll(1, dims=0), rows)  # type: ignore[arg-type]

    patch.setattr(ExpertsMLP, "__call__", mixed_up)


@pytest.fixture(scope="module")
def moe(demo: DemoPaths, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ColdEngine]]:
    """A cold engine to judge by, and another that is judged."""
    directory = tmp_path_factory.mktemp("moe")
    written, library = write_moe(demo, directory / "moe"), directory / "versions"
    spec = load_spec(written.model)
    vocabulary = spec.vocabulary()
    assert vocabulary is not None
    experts = lora_modules(spec.expert_linears())
    sources = [written.alpha]
    versions = (
        *write_versions(sources, library)[:1],
        write_extended(written.alpha, vocabulary, experts, library),
    )
    config = EngineConfig(model=ModelConfig(model=str(written.model), cpu_threads=1))
    with (
        closing(ColdEngine(config, versions)) as right,
        closing(ColdEngine(config, versions)) as judged,
    ):
        yield [right, judged]


@pytest.mark.parametrize(
    ("spoil", "is_found"),
    [(lambda patch: None, False), (no_lora_on_experts, True), (experts_of_the_row_before, True)],
    ids=["sound", "no-lora-on-experts", "experts-of-the-row-before"],
)
def test_a_fault_of_the_experts_is_found(
    spoil: Callable[[pytest.MonkeyPatch], None], is_found: bool, moe: list[ColdEngine]
) -> None:
    right, judged = moe
    judged._memo.clear()
    scope = Scope(
        vocab_size=right.vocab_size,
        num_versions=2,
        num_requests=12,
        has_chat=False,
        has_embeds=False,
    )
    trace = make_trace(1, scope)
    assert 1 in {load.version for load in trace.loads if isinstance(load, Load)}
    runner = FaultyRunner(judged, judged.digests, spoil=spoil)
    verdict = Fuzzer(runner, right, 16).check(trace)
    assert verdict.is_clean != is_found, verdict.lines()


def test_a_trace_of_a_small_model_is_not_played_on_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    save_trace(Trace(seed=5, model="moe", events=()), path)
    assert main(["fuzz", "--replay", str(path), "--model", "m", "--adapters", "a"]) == 2
    assert "own model 'moe'; leave out --model" in capsys.readouterr().err
