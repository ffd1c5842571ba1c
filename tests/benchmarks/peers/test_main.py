from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers.__main__ import Bench, run
from benchmarks.peers.environment import Environment, InstallError
from benchmarks.peers.measurements import REPEATS, Measurement, Phase, figure_of
from benchmarks.peers.peer import Deployment, Launch, Limits
from benchmarks.peers.phases import PHASES, names
from benchmarks.peers.report import EngineResult, PeerRun, PhaseFacts, read_run, write_report
from tests.bench.records import MACHINE
from tests.benchmarks.common.test_make_checkpoint import TINY
from tests.benchmarks.peers.test_report import LIMITS

SERVER = Path(__file__).with_name("constant_server.py")


class ConstantPeer:
    """Answers every request with the same tokens; `fault` says what goes wrong, or is "adapted"."""

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
        return Launch(command=(sys.executable, "-c", script, str(port), self.fault))


def phase(name: str) -> Phase:
    """The phase with short workloads."""
    found = next(phase for phase in PHASES if phase.name == name)
    rounds = tuple(tuple(shortened(m) for m in round) for round in found.rounds)
    return replace(found, rounds=rounds)


def shortened(measurement: Measurement) -> Measurement:
    spec = measurement.spec
    num_requests = min(8, spec.num_requests)
    spec = replace(spec, num_requests=num_requests, input_tokens=4, output_tokens=2)
    return replace(measurement, spec=replace(spec, shared_prefix_tokens=0))


def bench_of(directory: Path, name: str) -> Bench:
    return Bench(directory, directory / "data", (phase(name),), TINY, Path.mkdir, lambda: LIMITS)


async def measured(directory: Path, name: str, *peers: ConstantPeer) -> PeerRun:
    bench = bench_of(directory, name)
    engines = tuple(EngineResult(name=peer.name, notes=peer.notes) for peer in peers)
    run = PeerRun(machine=MACHINE, engines=engines)
    await bench.measure_phase(peers, bench.phases[0], run, lambda: None)
    return run


async def test_all_rows_of_a_phase_get_figures(tmp_path: Path) -> None:
    run = await measured(tmp_path, "base", ConstantPeer())
    (result,) = run.engines
    assert set(result.figures) == {"prefill", "decode-1", "decode-8", "closed-loop"}
    assert not result.reasons
    assert set(run.phases) == {"base"}
    for key, figure in result.figures.items():
        assert result.limits[key] == (LIMITS,) * len(figure.values)


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
    short = replace(bench.phases[0], rounds=bench.phases[0].rounds[1:2])
    await run(replace(bench, phases=(short,)), [sound, broken], tmp_path / "peers", None)
    first, second = json.loads((tmp_path / "peers.json").read_text())["run"]["engines"]
    assert len(first["figures"]["decode-1"]["values"]) == REPEATS
    assert not second["figures"]
    assert "no memory" in second["reasons"]["decode-1"]


async def test_phases_that_are_not_measured_again_stay_in_the_report(tmp_path: Path) -> None:
    bench, report = bench_of(tmp_path, "base"), tmp_path / "peers"
    base = replace(bench.phases[0], rounds=bench.phases[0].rounds[1:2])
    await run(replace(bench, phases=(base,)), [ConstantPeer()], report, None)
    first = read_run(report)
    await run(bench_of(tmp_path, "int8"), [ConstantPeer()], report, None)
    both = read_run(report)
    assert set(both.phases) == {"base", "int8"}
    assert both.engines[0].figures == first.engines[0].figures
    assert set(both.engines[0].reasons) > set(first.engines[0].reasons)


async def test_another_machines_figures_are_not_kept(tmp_path: Path) -> None:
    bench, report = bench_of(tmp_path, "int8"), tmp_path / "peers"
    facts = PhaseFacts(date="2026-01-02", commit="abc", load_average=0.0, busy_cores=0.0)
    engine = EngineResult(name="constant", notes="", figures={"prefill": figure_of([1.0])})
    write_report(PeerRun(machine=MACHINE, engines=(engine,), phases={"base": facts}), report, None)
    await run(bench, [ConstantPeer()], report, None)
    assert set(read_run(report).phases) == {"int8"}


async def test_measurements_of_one_round_take_turns_each_on_its_server(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, "zipf")
    few = replace(bench.phases[0], num_adapters=(4, 5), is_of_ours=False, rounds=zipf_of(4, 5))
    await run(replace(bench, phases=(few,)), [ConstantPeer("adapted")], tmp_path / "peers", None)
    (engine,) = read_run(tmp_path / "peers").engines
    assert set(engine.figures) == {"zipf-4", "zipf-1000"}


def zipf_of(*counts: int) -> tuple[tuple[Measurement, ...], ...]:
    """The phase's round for servers that have so many adapters."""
    (measurements,) = phase("zipf").rounds
    specs = [
        replace(m.spec, adapters=names("r8", n)) for m, n in zip(measurements, counts, strict=True)
    ]
    return (tuple(replace(m, spec=s) for m, s in zip(measurements, specs, strict=True)),)
