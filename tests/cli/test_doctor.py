"""`lora-serve doctor` says what is wrong with a machine, on machines that are made up."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from lora_serve.cli import doctor_machine, doctor_model, doctor_ranks, doctor_software
from lora_serve.cli.doctor_finding import Finding, Level
from lora_serve.cli.main import main
from lora_serve.ops.cpu import numa
from tests.cli.test_main import run

MACHINE = {
    "proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 1048576 kB\n",
    "proc/self/cgroup": "0::/box\n",
    "sys/fs/cgroup/box/cpu.max": "50000 100000",
    "sys/fs/cgroup/box/memory.max": str(2**30),
    "sys/fs/cgroup/box/memory.current": str(2**29),
    "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]",
    "proc/sys/vm/overcommit_memory": "2",
    "sys/devices/system/node/node0/cpulist": "0",
    "sys/devices/system/node/node1/cpulist": "1",
}


def machine(root: Path) -> Path:
    for name, text in MACHINE.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def by_subject(findings: list[Finding]) -> dict[str, Finding]:
    return {each.subject: each for each in findings}


def test_this_machine_can_serve_and_no_torch_is_imported() -> None:
    code, told, imported = run("doctor")
    assert code == 0, told
    assert told.splitlines()[0].startswith("lora-serve ")
    assert imported & {"torch", "transformers", "numpy"} == set()
    for subject in ("CPU", "memory", "temporary", "Python", "kernels"):
        assert f" {subject} " in told


def test_what_slows_a_machine_down_is_told_with_a_remedy(tmp_path: Path) -> None:
    found = by_subject(doctor_machine.machine_findings(machine(tmp_path)))
    assert found["memory"].told == "8.0 GiB, 512 MiB available; this control group may take " \
        "512 MiB more"  # fmt: skip
    for subject in ("memory", "quota", "huge pages", "NUMA", "overcommit"):
        assert found[subject].level is not Level.FACT, subject
        assert found[subject].remedy, subject


def test_a_temporary_directory_with_a_long_path_stops_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["can_start"] is False
    (error,) = [each for each in report["findings"] if each["level"] == "error"]
    assert error["subject"] == "temporary"
    assert "TMPDIR" in error["remedy"]


def test_a_machine_without_native_kernels_is_told_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_software, "NATIVE", "lora_serve.ops._nosuch")
    monkeypatch.setattr("shutil.which", lambda name: None)
    kernels = by_subject(doctor_software.software_findings())["kernels"]
    assert kernels.level is Level.WARNING
    assert "g++" in kernels.remedy


def test_a_model_that_fits_is_told_with_its_room(
    model_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(model_path), "--json"]) == 0
    found = {each["subject"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert "Qwen2ForCausalLM" in found["model"]["told"]
    longest = json.loads((model_path / "config.json").read_bytes())["max_position_embeddings"]
    assert " a token: room for " in found["KV cache"]["told"]
    most = f"128 of {longest:,} tokens"  # as many as --max-num-seqs, however much memory is free
    assert most in found["KV cache"]["told"]


def test_smollm2_is_told_by_its_name_and_in_the_type_that_it_is_served_in(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lora_serve.demo.smollm2.ensure_smollm2", lambda _: model_path)
    told = by_subject(doctor_model.model_findings("smollm2"))["model"]
    assert told.level is Level.FACT
    assert told.told.startswith("smollm2: Qwen2ForCausalLM")
    assert "parameters, float32" in told.told


def test_a_model_that_does_not_fit_is_an_error(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor_model, "available_bytes", lambda: 2**20)
    assert main(["doctor", str(model_path)]) == 1
    told = capsys.readouterr().out
    assert "more than the 1.0 MiB that are available" in " ".join(told.split())
    assert "A server cannot start here" in told
    assert main(["doctor", "nosuch"]) == 1


def test_ranks_are_told_of_with_their_threads_and_what_each_holds(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model has four heads, of which pairs share one of two KV heads."""
    for module in (doctor_ranks, numa):
        monkeypatch.setattr(module, "default_num_threads", lambda: 8)
    assert main(["doctor", str(model_path), "-tp", "4", "--json"]) == 0
    ranks = _ranks(capsys.readouterr().out)
    assert [each["told"] for each in ranks] == [
        "4 on 8 cores, each of 2 threads",
        "each holds about 99 KiB of the weights, and of the KV of each token 50% at most",
    ]
    assert main(["doctor", str(model_path), "--tensor-parallel-size", "5", "--json"]) == 1
    _, refused = _ranks(capsys.readouterr().out)
    assert refused["told"] == (
        "--tensor-parallel-size 5 is above the model's 4 attention heads; lower it"
    )
    assert refused["level"] == "error"
    assert main(["doctor", "-tp", "9", "--json"]) == 1
    (refused,) = _ranks(capsys.readouterr().out)
    assert "9 is above the 8 cores that may be used" in refused["told"]
    monkeypatch.setattr(doctor_ranks, "numa_nodes", lambda: [None, None])
    (hint,) = doctor_ranks.place_findings(2)
    assert "--cpu-ranks auto" in hint.remedy


def _ranks(report: str) -> list[dict[str, str]]:
    return [each for each in json.loads(report)["findings"] if each["subject"] == "ranks"]


def test_every_extra_that_a_user_may_want_is_looked_for() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for_users = set(project["optional-dependencies"]) - {"test", "docs", "deploy", "dev"}
    assert {extra for extra, _ in doctor_software.EXTRAS.values()} == for_users


def test_no_server_has_fewer_ranks_than_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "-tp", "0"]) == 2
    assert "--tensor-parallel-size 0 must be at least 1" in capsys.readouterr().err
