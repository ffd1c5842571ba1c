from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.measurements import PHASES, REPEATS, Measurement, Phase
from benchmarks.peer_report import EngineResult, PeerRun
from benchmarks.peers.environment import Environment, InstallError
from benchmarks.peers.peer import Deployment, Launch, Limits
from benchmarks.run_peers import Bench, run
from tests.bench.records import MACHINE
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


async def measured(directory: Path, name: str, *peers: ConstantPeer) -> PeerRun:
    bench = bench_of(directory, name)
    engines = tuple(EngineResult(name=peer.name, notes=peer.notes) for peer in peers)
    run = PeerRun(date="2026-01-02", machine=MACHINE, engines=engines)
    await bench.measure_phase(peers, bench.phases[0], run)
    return run


async def test_all_rows_of_a_phase_get_figures(tmp_path: Path) -> None:
    run = await measured(tmp_path, "base", ConstantPeer())
    (result,) = run.engines
    assert set(result.figures) == {"prefill", "decode-1", "decode-8", "closed-loop"}
    assert not result.reasons
    assert set(run.busy_cores) == {"base"}
    assert set(run.limits) == set(result.figures)


async def test_what_an_engine_cannot_do_is_left_out_with_its_reason(tmp_path: Path) -> None:
    (result,) = (await measured(tmp_path, "int8", ConstantPeer())).engines
    assert not result.figures
    assert set(result.reasons.values()) == {"only ever says one thing"}


async def test_an_engine_that_ignores_adapters_gets_no_figures_for_them(tmp_path: Path) -> None:
    (result,) = (await measured(tmp_path, "adapters", ConstantPeer())).engines
    assert not result.figures
    assert set(result.reasons.values()) == {"answers as the base, whatever the adapter"}


@pytest.mark.parametrize(
    ("fault", "reason"), [("prepare", "the converter failed"), ("launch", "no memory")]
)
async def test_a_phase_that_fails_gives_its_rows_the_reason(
    tmp_path: Path, fault: str, reason: str
) -> None:
    (result,) = (await measured(tmp_path, "base", ConstantPeer(fault))).engines
    assert len(result.reasons) == 4
    assert all(reason in why for why in result.reasons.values())


async def test_an_engine_that_cannot_be_installed_is_in_the_table_all_the_same(
    tmp_path: Path,
) -> None:
    peer = ConstantPeer()
    peer.recipe = "constant 1"
    (result,) = (await measured(tmp_path, "base", peer)).engines
    assert set(result.reasons.values()) == {"not installed: nothing to install it from"}


async def test_engines_that_fail_leave_the_others_their_turns(tmp_path: Path) -> None:
    sound, broken = ConstantPeer(), ConstantPeer("launch")
    broken.name = "broken"
    bench = bench_of(tmp_path, "base")
    short = replace(bench.phases[0], measurements=bench.phases[0].measurements[1:2])
    await run(replace(bench, phases=(short,)), [sound, broken], tmp_path / "peers", None)
    first, second = json.loads((tmp_path / "peers.json").read_text())["run"]["engines"]
    assert len(first["figures"]["decode-1"]["values"]) == REPEATS
    assert not second["figures"]
    assert "no memory" in second["reasons"]["decode-1"]
