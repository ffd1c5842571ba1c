from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.measurements import PHASES, Measurement, Phase
from benchmarks.peer_report import EngineResult
from benchmarks.peers.environment import Environment, InstallError
from benchmarks.peers.peer import Deployment, Launch, Limits
from benchmarks.run_peers import Bench, run
from tests.benchmarks.test_make_checkpoint import TINY
from tests.benchmarks.test_peer_report import LIMITS

SERVER = Path(__file__).with_name("constant_server.py")


class ConstantPeer:
    """Answers every request with the same tokens; `faults` says what goes wrong."""

    name = "constant"
    recipe = ""
    notes = "for tests"
    limits = Limits(int8="only ever says one thing")

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def install(self, environment: Environment) -> None:
        raise InstallError("nothing to install it from")

    def prepare(self, environment: Environment, deployment: Deployment) -> None:
        if self.fault == "prepare":
            raise InstallError("the converter failed")

    def launch(self, environment: Environment, deployment: Deployment, port: int) -> Launch:
        script = "raise SystemExit('no memory')" if self.fault == "launch" else SERVER.read_text()
        return Launch(command=(sys.executable, "-c", script, str(port)))


def phase(name: str) -> Phase:
    """The phase with short workloads."""
    found = next(phase for phase in PHASES if phase.name == name)
    measurements = tuple(shortened(m) for m in found.measurements)
    return replace(found, measurements=measurements)


def shortened(measurement: Measurement) -> Measurement:
    spec = replace(measurement.spec, input_tokens=4, output_tokens=2, shared_prefix_tokens=0)
    return replace(measurement, spec=spec)


def bench_of(directory: Path, name: str) -> Bench:
    return Bench(directory, directory / "data", (phase(name),), TINY, Path.mkdir, lambda: LIMITS)


async def measured(directory: Path, name: str, peer: ConstantPeer) -> EngineResult:
    bench = bench_of(directory, name)
    result = EngineResult(name=peer.name, notes=peer.notes)
    await bench.measure_phase(peer, bench.phases[0], result)
    return result


async def test_all_rows_of_a_phase_get_figures(tmp_path: Path) -> None:
    result = await measured(tmp_path, "base", ConstantPeer())
    assert set(result.figures) == {"prefill", "decode-1", "decode-8", "closed-loop"}
    assert not result.reasons
    assert len(result.busy_cores) == 1
    assert set(result.limits) == {"base"}


async def test_what_an_engine_cannot_do_is_left_out_with_its_reason(tmp_path: Path) -> None:
    result = await measured(tmp_path, "int8", ConstantPeer())
    assert not result.figures
    assert set(result.reasons.values()) == {"only ever says one thing"}


async def test_an_engine_that_ignores_adapters_gets_no_figures_for_them(tmp_path: Path) -> None:
    result = await measured(tmp_path, "adapters", ConstantPeer())
    assert not result.figures
    assert set(result.reasons.values()) == {"answers as the base, whatever the adapter"}


@pytest.mark.parametrize(
    ("fault", "reason"), [("prepare", "the converter failed"), ("launch", "no memory")]
)
async def test_a_phase_that_fails_gives_its_rows_the_reason(
    tmp_path: Path, fault: str, reason: str
) -> None:
    result = await measured(tmp_path, "base", ConstantPeer(fault))
    assert len(result.reasons) == 4
    assert all(reason in why for why in result.reasons.values())


async def test_an_engine_that_cannot_be_installed_is_in_the_table_all_the_same(
    tmp_path: Path,
) -> None:
    peer = ConstantPeer()
    peer.recipe = "constant 1"
    result = await measured(tmp_path, "base", peer)
    assert set(result.reasons.values()) == {"not installed: nothing to install it from"}


async def test_ours_is_measured_before_and_after_the_others(tmp_path: Path) -> None:
    ours, other = ConstantPeer(), ConstantPeer()
    ours.name = "lora-serve"
    bench = bench_of(tmp_path, "base")
    short = replace(bench.phases[0], measurements=bench.phases[0].measurements[1:2])
    await run(replace(bench, phases=(short,)), [ours, other], tmp_path / "peers", None)
    engines = json.loads((tmp_path / "peers.json").read_text())["run"]["engines"]
    counts = [len(engine["figures"]["decode-1"]["values"]) for engine in engines]
    assert counts[0] == 2 * counts[1]
