"""What `lora-serve simulate` prints and refuses; its figures are tested in tests/simulate."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from lora_serve.bench.workload import TimedRequest
from lora_serve.bench.workload_file import load_workload, save_workload
from lora_serve.cli import simulate_fit
from lora_serve.cli.main import main
from lora_serve.config import EngineConfig, LoRAConfig, ModelConfig
from lora_serve.demo.given_model import GivenModel
from lora_serve.simulate.costs import Processes, ProcessWork, save_costs
from tests.simulate.costs import COSTS

SMALL = ("--num-requests", "12", "--input-len", "20", "--output-len", "4", "--request-rate", "20")


@pytest.fixture
def cost(tmp_path: Path) -> str:
    path = tmp_path / "costs.json"
    save_costs(COSTS, path)
    return str(path)


def rows(path: Path) -> list[dict[str, object]]:
    return list(msgspec.json.decode(path.read_bytes())["rows"])


def test_the_collector_collects_again_after_a_simulation(cost: str) -> None:
    assert gc.isenabled()
    assert main(["simulate", "--cost", cost, *SMALL]) == 0
    assert gc.isenabled()


def test_each_combination_is_a_row_of_the_table_and_of_the_json(
    cost: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    words = ("--replicas", "1,3", "--policy", "round-robin", "least-loaded")
    more = ("--adapters-per-replica", "2-3", "--num-adapters", "5", "--json", str(out))
    assert main(["simulate", "--cost", cost, *SMALL, *words, *more]) == 0
    found = rows(out)
    choices = [tuple(row["choice"].values()) for row in found]  # type: ignore[attr-defined]
    assert choices == [
        (replicas, policy, adapters)
        for policy in ("round-robin", "least-loaded")
        for adapters in (2, 3)
        for replicas in (1, 3)
    ]
    assert all(row["num_requests"] == 12 for row in found)
    table = capsys.readouterr().out
    assert table.count("round-robin") == 4
    assert "goodput/s" in table


def test_the_fewest_replicas_are_found(
    cost: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One replica fewer is tried, too, and misses the limits."""
    words = ("--num-requests", "60", "--request-rate", "60", "--goodput", "ttft:100", "e2el:2000")
    found, fewer = tmp_path / "found.json", tmp_path / "fewer.json"
    asked = ["simulate", "--cost", cost, *words]
    assert main([*asked, "--find-replicas", "--json", str(found)]) == 0
    assert "replicas keep 99.0%" in capsys.readouterr().out
    (row,) = rows(found)
    number = row["choice"]["num_replicas"]  # type: ignore[index]
    assert number > 1
    assert row["goodput"]["share"] >= 0.99  # type: ignore[index]
    assert main([*asked, "--replicas", str(number - 1), "--json", str(fewer)]) == 0
    assert rows(fewer)[0]["goodput"]["share"] < 0.99  # type: ignore[index]


def test_too_few_replicas_for_the_pace_are_not_tried(
    cost: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--num-requests", "200", "--request-rate", "300", "--output-len", "40")
    asked = ["simulate", "--cost", cost, *words, "--goodput", "e2el:900", "--find-replicas"]
    assert main(asked) == 0
    tried = [int(line.split()[0]) for line in capsys.readouterr().err.splitlines()]
    assert min(tried) > 2
    assert main([*asked, "--max-concurrency", "100000"]) == 0  # who waits has another pace
    tried = [int(line.split()[0]) for line in capsys.readouterr().err.splitlines()]
    assert min(tried) == 1


def test_a_saved_workload_gives_the_same_figures(cost: str, tmp_path: Path) -> None:
    saved, first, second = (tmp_path / name for name in ("w.jsonl", "1.json", "2.json"))
    asked = ["simulate", "--cost", cost]
    main([*asked, *SMALL, "--save-workload", str(saved), "--json", str(first)])
    main([*asked, "--workload", str(saved), "--json", str(second)])
    assert len(load_workload(saved)) == 12
    assert rows(first) == rows(second)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--replicas 0", "--replicas 0: want a number of at least 1"),
        ("--replicas 1-1000000000000", "1000000000000 must be at most 100000"),
        ("--replicas 4-2", "--replicas 4-2: want a number"),
        ("--adapters-per-replica many", "--adapters-per-replica many: want"),
        (f"--adapters-per-replica {10**20}", f"{10**20} must be at most 10000000"),
        ("--goodput ttft", "--goodput ttft: want KEY:MILLISECONDS"),
        ("--goodput itl:3", "with one of ttft, tpot, e2el"),
        ("--find-replicas", "--find-replicas needs --goodput"),
        ("--find-replicas --goodput ttft:1 --max-replicas 3", "3 replicas are not enough"),
        ("--max-replicas 0", "--max-replicas 0 must be at least 1"),
        ("--attainment 1.5", "--attainment 1.5 must be above 0"),
        ("--num-adapters 2 --adapters a", "--num-adapters and --adapters both name adapters"),
        ("--num-adapters -1", "--num-adapters -1 must be at least 0"),
        (f"--num-adapters {10**20}", f"--num-adapters {10**20} must be at least 0 and at most"),
        ("--num-requests 0", "num_requests 0 must be at least 1"),
        ("--num-requests -3", "num_requests -3 must be at least 1"),
        (f"--num-requests {10**20}", f"num_requests {10**20} must be at most 100000000"),
        ("--max-concurrency 0", "--max-concurrency 0 must be at least 1"),
        ("--max-num-seqs 0", "--max-num-seqs 0 must be at least 1"),
        ("--input-len 600", "above --max-model-len 512"),
        ("--num-adapters 2 --roll-out b@1", "--roll-out b: no request asks for it"),
        ("--workload nowhere.jsonl", "nowhere.jsonl: cannot be read"),
    ],
)
def test_what_cannot_be_simulated_is_told_in_one_line(
    cost: str, words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--cost", cost, *SMALL, *words.split()]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(error) == 1
    assert told in error[0]


def costs_with(**fields: object) -> str:
    return msgspec.json.encode(msgspec.structs.replace(COSTS, **fields)).decode()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "cannot be read"),
        ("[]", "not a cost file"),
        ('{"format": "lora-serve/costs/9"}', "not a cost file"),
        (costs_with(request_seconds=-1.0), "no time below 0"),
        (costs_with(ratios={"decode": (1.0, 0.0)}), "ratios of 'decode' steps must be above 0"),
        (costs_with(ratios={"idle": (1.0,)}), "ratios of 'idle' steps must be"),
        (costs_with(processes=Processes(engine_threads=0.0)), "engine_threads 0 must be above 0"),
        (costs_with(processes=Processes(api=ProcessWork(token=-1e-9))), "no time below 0"),
    ],
)  # fmt: skip
def test_a_file_that_holds_no_costs_is_told_by_its_name(
    tmp_path: Path, text: str | None, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    if text is not None:
        path.write_text(text)
    assert main(["simulate", "--cost", str(path)]) == 2
    assert f"--cost {path}: {told}" in capsys.readouterr().err.replace("want ", "")


def test_without_a_cost_file_the_command_says_how_to_make_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["simulate"]) == 2
    assert "simulate fit --output FILE" in capsys.readouterr().err


def test_a_simulation_imports_no_torch(cost: str, tmp_path: Path) -> None:
    saved = tmp_path / "w.jsonl"
    save_workload([TimedRequest((1, 2, 3), 2, "a")], saved)
    script = (
        "import sys; from lora_serve.cli.main import main; code = main(sys.argv[1:]);"
        "print([n for n in ('torch', 'transformers', 'peft') if n in sys.modules]); sys.exit(code)"
    )
    words = ["simulate", "--cost", cost, "--workload", str(saved)]
    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "[]"), done.stderr


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_a_fit_that_would_measure_nothing_or_for_ever_is_refused(
    seconds: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["simulate", "fit", "--output", str(tmp_path / "costs.json"), "--seconds", seconds]
    assert main(asked) == 2
    assert f"--seconds {seconds} must be a number above 0" in capsys.readouterr().err


def test_smollm2_is_fitted_from_the_file_that_was_fetched_in_its_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lora_serve.demo.smollm2.ensure_smollm2", lambda _: tmp_path / "a.gguf")
    model = simulate_fit._config(["smollm2", "--enable-lora"]).model
    assert (model.model, model.dtype) == (str(tmp_path / "a.gguf"), "float32")


def test_adapters_are_made_up_for_a_model_that_has_no_config_json(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A GGUF file is such a model: there is no config.json of it."""
    projections = {"model.layers.0.self_attn.q_proj": (4, 6)}
    made = GivenModel("a.gguf", projections)
    monkeypatch.setattr(simulate_fit, "given_model", lambda *_: made)
    lora = LoRAConfig(enable_lora=True)
    with simulate_fit._adapters(
        EngineConfig(model=ModelConfig(model="a.gguf"), lora=lora)
    ) as paths:
        assert len(paths) == simulate_fit.NUM_ADAPTERS
        assert all((Path(path) / "adapter_config.json").exists() for path in paths)
