from __future__ import annotations

import argparse
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from lora_serve.cli.arguments import add_config_arguments, engine_config
from lora_serve.cli.fuzz_stages import SERVER_FLAGS, other_impls, possible_ranks
from lora_serve.cli.main import main
from lora_serve.config import EngineConfig
from lora_serve.errors import ConfigError
from lora_serve.fuzz.generate import Scope, make_trace
from lora_serve.fuzz.oracle.campaign import OracleTotals
from lora_serve.fuzz.reference import ColdEngine
from lora_serve.fuzz.trace import load_trace
from lora_serve.llm import LLM
from lora_serve.ops.cpu import numa
from lora_serve.ops.cpu.threads import default_num_threads
from tests.fakes.peft_adapters import make_peft
from tests.fakes.served_model import save_served_model

AS_FUZZED = {"lm_head_screen": "on", "max_model_len": 512, "cpu_threads": 1}
AS_REDUCED = {"tensor_parallel_size": 2, "tensor_parallel_reduce": "all-reduce"}


def config_of(model: Path, *flags: str) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser)
    return engine_config(parser.parse_args([str(model), *SERVER_FLAGS, *flags]))


def test_the_oracle_repeats_one_trace_and_writes_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "figures.json"
    command = f"fuzz --oracle --seed 6 --num-operations 30 --json {figures}"
    assert main(command.split()) == 0
    assert "all as if alone" in capsys.readouterr().out
    totals = msgspec.json.decode(figures.read_bytes(), type=OracleTotals)
    assert (totals.first_seed, totals.num_traces, totals.failures) == (6, 1, [])
    assert totals.num_requests > 0


def test_a_trace_has_at_least_one_operation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("fuzz --oracle --num-operations 0".split()) == 2
    assert "--num-operations 0 must be at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-operations 3", "--num-operations needs --oracle"),
        ("--num-requests 0", "--num-requests 0 must be at least 1"),
        ("--requests-per-trace 0", "--requests-per-trace 0 must be at least 1"),
        ("--concurrency -2", "--concurrency -2 must be at least 1"),
        ("--times 0", "--times 0 must be at least 1"),
        ("--duration 0", "--duration 0 must be above 0"),
        ("--duration nan", "--duration nan must be above 0"),
        ("--shrink-seconds -1", "--shrink-seconds -1 must be at least 0"),
        ("--adapters a", "--adapters needs --model"),
        ("--model m", "--model needs --adapters"),
    ],
)
def test_what_does_not_belong_together_is_refused(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fuzz", *flags.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("cores", "sizes"), [(1, (1,)), (2, (1, 2)), (4, (1, 2, 3, 4))])
def test_servers_have_the_ranks_that_cores_and_four_heads_allow(
    cores: int, sizes: tuple[int, ...], model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numa, "default_num_threads", lambda: cores)
    config = config_of(model_path)
    assert possible_ranks(config) == sizes
    assert possible_ranks(config, "segments") == tuple(size for size in sizes if size != 3)


def test_traces_draw_how_many_ranks_there_are() -> None:
    some = {"vocab_size": 300, "num_versions": 6, "num_requests": 1}
    scope = Scope(**some, num_ranks=(2, 4), in_segments=(1, 2), all_reduced=(2, 4))
    flags = [make_trace(seed, scope).flags for seed in range(120)]
    flag = "--tensor-parallel-size"
    drawn = {each[each.index(flag) + 1] if flag in each else "1" for each in flags}
    assert drawn == {"1", "2", "4"}
    for reduce, sizes in (("segments", {"1", "2"}), ("all-reduce", {"2", "4"})):
        summed = [each for each in flags if reduce in each]
        assert {each[each.index(flag) + 1] if flag in each else "1" for each in summed} == sizes


@pytest.mark.skipif(default_num_threads() < 2, reason="two ranks need two cores")
def test_the_cold_engine_has_as_many_ranks_as_answers_depend_on(model_path: Path) -> None:
    """One of a single rank would take a right answer for another model's."""
    two, reduce = ("-tp", "2"), ("--tensor-parallel-reduce", "all-reduce")
    with (
        closing(ColdEngine(config_of(model_path, "--cpu-threads", "1"), [])) as cold,
        closing(LLM(str(model_path), **AS_FUZZED, **AS_REDUCED)) as served,
    ):
        assert cold.under(two) is cold
        assert cold.under(reduce) is cold
        reduced = cold.under((*two, *reduce))
        assert served.model_info.fingerprint.hex().startswith(reduced.fingerprint)
        assert reduced.fingerprint != cold.fingerprint


def test_traces_draw_what_runs_the_model_but_not_with_ranks(model_path: Path) -> None:
    scope = Scope(
        vocab_size=300,
        num_versions=6,
        num_requests=1,
        num_ranks=(2,),
        model_impls=other_impls(config_of(model_path)),
        num_versions_for_all=5,
    )
    all_traces = [make_trace(seed, scope) for seed in range(60)]
    flags = [trace.flags for trace in all_traces]
    by_transformers = [each for each in flags if "--model-impl" in each]
    assert 0 < len(by_transformers) < 30
    assert {each[each.index("--model-impl") + 1] for each in by_transformers} == {"transformers"}
    assert not any("--tensor-parallel-size" in each for each in by_transformers)
    most = {
        is_other: max(load.version for trace in traces for load in trace.loads)
        for is_other in (False, True)
        if (traces := [each for each in all_traces if ("--model-impl" in each.flags) == is_other])
    }
    assert most[False] == 5 > most[True]


def test_traces_draw_fewer_bits_and_the_cold_engine_has_as_many(model_path: Path) -> None:
    scope = Scope(vocab_size=300, num_versions=1, num_requests=1, quantizations=("int8", "int4"))
    flags = [make_trace(seed, scope).flags for seed in range(60)]
    drawn = [each for each in flags if "--quantization" in each]
    assert 0 < len(drawn) < 30
    assert {each[each.index("--quantization") + 1] for each in drawn} == {"int8", "int4"}
    assert {"--quantize-activations" in each for each in drawn} == {True, False}
    with closing(ColdEngine(config_of(model_path), [])) as cold:
        in_floats = cold.under(["--max-loras", "2"])
        in_8_bits = cold.under(["--quantization", "int8", "--max-loras", "2"])
        assert in_floats is cold
        assert in_8_bits.fingerprint != cold.fingerprint


@pytest.mark.parametrize(
    "flags", ["--model-impl lora_serve", "--model-impl transformers", "--tensor-parallel-size 2"]
)
def test_what_runs_the_model_is_not_drawn_where_it_is_given_or_nothing_else_can(
    flags: str, model_path: Path
) -> None:
    assert other_impls(config_of(model_path, *flags.split())) == ()


def test_transformers_modules_are_not_drawn_where_they_cannot_serve_an_adapter(
    tmp_path: Path,
) -> None:
    model = save_served_model(tmp_path / "model", "olmoe")
    of_attention, of_experts = tmp_path / "attention", tmp_path / "experts"
    make_peft("olmoe", 0).save_pretrained(str(of_attention))
    experts = ["experts.gate_up_proj", "experts.down_proj"]
    make_peft("olmoe", 0, target_parameters=experts).save_pretrained(str(of_experts))
    config = config_of(model)
    assert other_impls(config, [of_attention]) == ("transformers",)
    assert other_impls(config, [of_attention, of_experts]) == ()


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match="holds no trace"):
        load_trace(path)
