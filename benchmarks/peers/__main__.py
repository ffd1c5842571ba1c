"""Measure lora-serve beside its peers: python -m benchmarks.peers [PEER …].

Each engine gets the same prompts, token by token, on the same machine within the same run: phase
by phase, the engines of a phase in turns, run by run, and the machine's limits between every two.
What fails or cannot be done is in the table with its reason; the run goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from benchmarks.common.busy import busy_cores
from benchmarks.common.limits import MachineLimits, measure_limits_briefly
from benchmarks.common.make_checkpoint import (
    ALL_PROJECTIONS,
    ATTENTION_ONLY,
    QWEN_0_5B,
    ModelShape,
    ensure_adapters,
    ensure_checkpoint,
)
from benchmarks.peers.environment import (
    Environment,
    InstallError,
    create_venv,
    ensure_environment,
)
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.measurements import (
    Measurement,
    MeasurementFailedError,
    Need,
    Phase,
    Turns,
    adapter_changes_answers,
)
from benchmarks.peers.openvino import OpenVino
from benchmarks.peers.ours import LoraServe
from benchmarks.peers.peer import MODEL_NAME, Deployment, Peer
from benchmarks.peers.phases import PHASES, names
from benchmarks.peers.report import (
    OURS,
    EngineResult,
    PeerRun,
    PhaseFacts,
    read_run,
    write_report,
)
from benchmarks.peers.transformers import Transformers, TransformersBatching
from benchmarks.peers.vllm import Vllm
from lora_serve.bench.client import Endpoint
from lora_serve.bench.http_stream import Origin
from lora_serve.bench.machine import describe_machine
from lora_serve.bench.server import ServerFailedError, running_server
from lora_serve.demo.server_process import free_port

PEERS: tuple[Peer, ...] = (
    LoraServe(), Vllm(), LlamaCpp(), OpenVino(), Transformers(), TransformersBatching(),
)  # fmt: skip
USUAL = ("lora-serve", "vllm", "llama.cpp", "openvino", "transformers")
PATIENCE_SECONDS = 600.0  # some compile at every start
CACHE = Path.home() / ".cache" / "lora-serve"


@dataclass(frozen=True, slots=True)
class Bench:
    """Where things lie: environments and converted models, logs, and what is served."""

    environments: Path
    data: Path
    phases: tuple[Phase, ...]
    shape: ModelShape = QWEN_0_5B
    create_venv: Callable[[Path], None] = create_venv
    measure_limits: Callable[[], MachineLimits] = measure_limits_briefly

    def deployment(self, phase: Phase, num_adapters: int) -> Deployment:
        small = phase.small_adapters
        kind, adapter = ("r8", ATTENTION_ONLY) if small else ("r16", ALL_PROJECTIONS)
        return Deployment(
            checkpoint=ensure_checkpoint(self.data / "model", self.shape),
            adapters=ensure_adapters(self.data / kind, num_adapters, adapter, self.shape),
            quantization=phase.quantization,
            quantize_activations=phase.quantize_activations,
            max_running=phase.max_running,
            max_model_len=phase.max_model_len,
            num_threads=torch.get_num_threads(),
        )

    async def measure_phase(
        self, peers: Sequence[Peer], phase: Phase, run: PeerRun, note: Callable[[], None]
    ) -> None:
        """Serve the phase with all engines that can, and let them take turns.

        Adds to `run`, and notes whenever a round is in it.
        """
        start, load_average = datetime.now(UTC), round(os.getloadavg()[0], 2)
        async with AsyncExitStack() as stack:
            served = [
                one
                for peer in peers
                for server in range(len(phase.num_adapters))
                if (one := await self._serve(stack, peer, phase, server, run.engine(peer.name)))
            ]
            run.phases[phase.name] = PhaseFacts(
                date=start.strftime("%Y-%m-%d"),
                commit=describe_machine().commit,
                load_average=load_average,
                busy_cores=round(busy_cores(), 2),
            )
            for measurements in phase.rounds:
                await self._take_turns(served, measurements)
                note()

    async def _serve(
        self, stack: AsyncExitStack, peer: Peer, phase: Phase, server: int, result: EngineResult
    ) -> Served | None:
        """The engine's server, running until the stack ends; None with reasons in `result`."""
        if reason := _cannot(peer, phase.needs):
            return _give_reason(result, phase, reason)
        environment = Environment(self.environments / peer.name.removesuffix("-batching"))
        try:
            if peer.recipe:
                ensure_environment(environment.root, peer.recipe, peer.install, self.create_venv)
        except InstallError as error:
            return _give_reason(result, phase, f"not installed: {error}")
        try:
            endpoint = await self._start(stack, peer, environment, phase, server)
            if any(phase.num_adapters) and not await adapter_changes_answers(endpoint, _one(phase)):
                return _give_reason(result, phase, "answers as the base, whatever the adapter")
        except (InstallError, ServerFailedError, MeasurementFailedError) as error:
            return _give_reason(result, phase, str(error))
        return Served(peer, endpoint, server, result)

    async def _start(
        self,
        stack: AsyncExitStack,
        peer: Peer,
        environment: Environment,
        phase: Phase,
        server: int,
    ) -> Endpoint:
        deployment = self.deployment(phase, phase.num_adapters[server])
        peer.prepare(environment, deployment)
        port = free_port()
        launch = peer.launch(environment, deployment, port)
        url = f"http://127.0.0.1:{port}"
        self.environments.mkdir(parents=True, exist_ok=True)  # for a peer that needs none
        log = self.environments / f"{peer.name}-{phase.name}-{server}.log"
        start = time.monotonic()
        variables = {**os.environ, **launch.variables}
        await stack.enter_async_context(
            running_server(launch.command, url, log, variables, launch.ready_path, PATIENCE_SECONDS)
        )
        _say(f"{peer.name}, {phase.name}: up after {time.monotonic() - start:.0f} s")
        return Endpoint(Origin.parse(url), MODEL_NAME, adapter_fields=launch.adapter_fields)

    async def _take_turns(
        self, served: Sequence[Served], measurements: Sequence[Measurement]
    ) -> None:
        """Between every two turns the machine's limits: what it is capable of changes."""
        taking = [
            Taking(one, measurement, Turns(one.endpoint, measurement), [])
            for one in served
            for measurement in measurements
            if one.takes(measurement)
        ]
        before = self.measure_limits()
        while taking:
            for turn in tuple(taking):
                wants_more = await turn.take()
                after = self.measure_limits()
                turn.limits.append(before.best_of(after))
                before = after
                if not wants_more:
                    taking.remove(turn)
                    turn.note()


@dataclass(frozen=True, slots=True)
class Served:
    """An engine whose server runs, and where its figures go."""

    peer: Peer
    endpoint: Endpoint
    server: int
    result: EngineResult

    def takes(self, measurement: Measurement) -> bool:
        """Whether it does; if it cannot, its result says why."""
        if measurement.server != self.server:
            return False
        if reason := _cannot(self.peer, measurement.needs):
            self.fail(measurement, reason)
        return not reason

    def fail(self, measurement: Measurement, reason: str) -> None:
        for row in measurement.rows:
            self.result.reasons[row.key] = reason
            _say(f"  {self.peer.name}, {row.key}: {reason}")


@dataclass(frozen=True, slots=True)
class Taking:
    """An engine at one measurement. limits: what the machine was capable of around each turn."""

    one: Served
    measurement: Measurement
    turns: Turns
    limits: list[MachineLimits]

    async def take(self) -> bool:
        """Whether the engine is to take another turn."""
        try:
            await self.turns.take()
        except MeasurementFailedError as error:
            self.one.fail(self.measurement, str(error))
            return False
        return not self.turns.is_done

    def note(self) -> None:
        """Put the figures, if it did not fail, where the engine's figures go."""
        if not self.turns.is_done:
            return
        for key, figure in self.turns.figures().items():
            self.one.result.figures[key] = figure
            self.one.result.limits[key] = tuple(self.limits)
            _say(f"  {self.one.peer.name}, {key}: {figure}")


def _one(phase: Phase) -> str:
    (name,) = names("r8" if phase.small_adapters else "r16", 1)
    return name


def _cannot(peer: Peer, needs: Sequence[Need]) -> str:
    """Why the engine cannot do it, or nothing."""
    return next((reason for need in needs if (reason := getattr(peer.limits, need))), "")


def _give_reason(result: EngineResult, phase: Phase, reason: str) -> None:
    _say(f"{result.name}, {phase.name}: {reason}")
    for key in phase.keys:
        result.reasons.setdefault(key, reason)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def run(bench: Bench, peers: Sequence[Peer], report: Path, page: Path | None) -> None:
    """Measure all, and write after each round, so that a run cut short leaves what it has.

    Phases of an earlier run on such a machine that are not measured now stay in the report.
    """
    done = _begun(bench, peers, report)
    _say(f"{done.machine}")
    ours = [peer for peer in peers if peer.name == OURS]
    note = partial(write_report, done, report, page)
    for phase in bench.phases:
        await bench.measure_phase(ours if phase.is_of_ours else peers, phase, done, note)
        note()


def _begun(bench: Bench, peers: Sequence[Peer], report: Path) -> PeerRun:
    """The earlier run without what is measured now; a new one if it was another machine's."""
    new = PeerRun(
        machine=describe_machine(),
        engines=tuple(EngineResult(name=peer.name, notes=peer.notes) for peer in peers),
    )
    try:
        old = read_run(report).without(bench.phases)
    except (FileNotFoundError, ValueError):
        return new
    if not old.machine.is_like(new.machine) or not old.phases:
        return new
    known = {engine.name: engine for engine in old.engines}
    engines = {engine.name: engine for engine in new.engines} | known
    return replace(old, machine=new.machine, engines=tuple(engines.values()))


def main() -> None:
    by_name = {peer.name: peer for peer in PEERS}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "peers",
        nargs="*",
        metavar="PEER",
        help=f"of {', '.join(by_name)}; all but the last if left out",
    )
    parser.add_argument(
        "--phases",
        nargs="+",
        choices=[phase.name for phase in PHASES],
        default=[phase.name for phase in PHASES],
        help="in this order; those left out keep what was measured on this machine before",
    )
    parser.add_argument(
        "--environments",
        type=Path,
        metavar="DIR",
        default=Path(os.environ.get("LORA_SERVE_PEERS") or CACHE / "peers"),
    )
    parser.add_argument("--data", type=Path, default=CACHE / "bench", metavar="DIR")
    parser.add_argument(
        "--results", type=Path, metavar="STEM", default=Path("benchmarks/results/peers")
    )
    parser.add_argument("--page", type=Path, help="Page whose table is replaced by the new one.")
    args = parser.parse_args()
    unknown = [name for name in args.peers if name not in by_name]
    if unknown:
        parser.error(f"unknown peer {unknown[0]}; have {', '.join(by_name)}")
    phases = {phase.name: phase for phase in PHASES}
    bench = Bench(args.environments, args.data, tuple(phases[name] for name in args.phases))
    chosen = [by_name[name] for name in args.peers or USUAL]
    asyncio.run(run(bench, chosen, args.results, args.page))


if __name__ == "__main__":
    main()
