"""Measure lora-serve and its peers one after another: python -m benchmarks.run_peers [PEER …].

Each engine gets the same prompts, token by token, on the same machine within the same run: phase
by phase, so that what is compared was measured minutes apart, and ours before and after the others.
What fails or cannot be done is in the table with its reason; the run goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.busy import busy_cores
from benchmarks.limits import MachineLimits, measure_limits
from benchmarks.make_checkpoint import (
    ALL_PROJECTIONS,
    ATTENTION_ONLY,
    QWEN_0_5B,
    ModelShape,
    ensure_adapters,
    ensure_checkpoint,
)
from benchmarks.measurements import (
    ONE,
    PHASES,
    MeasurementFailedError,
    Need,
    Phase,
    adapter_changes_answers,
    measure,
)
from benchmarks.peer_report import OURS, EngineResult, PeerRun, write_report
from benchmarks.peers.environment import (
    Environment,
    InstallError,
    create_venv,
    ensure_environment,
)
from benchmarks.peers.llama_cpp import LlamaCpp
from benchmarks.peers.openvino import OpenVino
from benchmarks.peers.ours import LoraServe
from benchmarks.peers.peer import MODEL_NAME, Deployment, Peer
from benchmarks.peers.transformers import Transformers, TransformersBatching
from benchmarks.peers.vllm import Vllm
from lora_serve.bench.client import Endpoint
from lora_serve.bench.http_stream import Origin
from lora_serve.bench.machine import describe_machine
from lora_serve.bench.server import ServerFailedError, free_port, running_server

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
    measure_limits: Callable[[], MachineLimits] = measure_limits

    def deployment(self, phase: Phase) -> Deployment:
        small = phase.small_adapters
        kind, adapter = ("r8", ATTENTION_ONLY) if small else ("r16", ALL_PROJECTIONS)
        return Deployment(
            checkpoint=ensure_checkpoint(self.data / "model", self.shape),
            adapters=ensure_adapters(self.data / kind, phase.num_adapters, adapter, self.shape),
            quantization=phase.quantization,
            quantize_activations=phase.quantize_activations,
            num_threads=torch.get_num_threads(),
        )

    async def measure_phase(self, peer: Peer, phase: Phase, result: EngineResult) -> None:
        """Serve what the phase needs and add its figures, or the reasons for none, to `result`."""
        if reason := _cannot(peer, phase.needs):
            return _give_reason(result, phase, reason)
        root = self.environments / peer.name.removesuffix("-batching")
        environment = Environment(root)
        try:
            if peer.recipe:
                ensure_environment(root, peer.recipe, peer.install, self.create_venv)
        except InstallError as error:
            return _give_reason(result, phase, f"not installed: {error}")
        try:
            deployment = self.deployment(phase)
            peer.prepare(environment, deployment)
            await self._serve_phase(peer, environment, deployment, phase, result)
        except (InstallError, ServerFailedError) as error:
            _give_reason(result, phase, str(error))
        return None

    async def _serve_phase(
        self,
        peer: Peer,
        environment: Environment,
        deployment: Deployment,
        phase: Phase,
        result: EngineResult,
    ) -> None:
        port = free_port()
        launch = peer.launch(environment, deployment, port)
        url = f"http://127.0.0.1:{port}"
        log = self.environments / f"{peer.name}-{phase.name}.log"
        start = time.monotonic()
        variables = {**os.environ, **launch.variables}
        result.busy_cores.append(round(busy_cores(), 2))
        limits = self.measure_limits()
        result.limits[phase.name] = limits.best_of(result.limits.get(phase.name, limits))
        async with running_server(
            launch.command, url, log, variables, launch.ready_path, PATIENCE_SECONDS
        ):
            _say(f"{peer.name}, {phase.name}: up after {time.monotonic() - start:.0f} s")
            endpoint = Endpoint(Origin.parse(url), MODEL_NAME, adapter_fields=launch.adapter_fields)
            await _measure_all(peer, endpoint, phase, result)


async def _measure_all(peer: Peer, endpoint: Endpoint, phase: Phase, result: EngineResult) -> None:
    if phase.num_adapters and not await adapter_changes_answers(endpoint, *_one(phase)):
        return _give_reason(result, phase, "answers as the base, whatever the adapter")
    for measurement in phase.measurements:
        keys = [row.key for row in measurement.rows]
        reason = _cannot(peer, measurement.needs)
        if not reason:
            try:
                result.add(await measure(endpoint, measurement))
            except MeasurementFailedError as error:
                reason = str(error)
        for key in keys:
            if reason:
                result.reasons[key] = reason
            _say(f"  {key}: {reason or result.figures[key]}")
    return None


def _one(phase: Phase) -> tuple[str, ...]:
    return ("r8-0",) if phase.small_adapters else ONE


def _cannot(peer: Peer, needs: Sequence[Need]) -> str:
    """Why the engine cannot do it, or nothing."""
    return next((reason for need in needs if (reason := getattr(peer.limits, need))), "")


def _give_reason(result: EngineResult, phase: Phase, reason: str) -> None:
    _say(f"{result.name}, {phase.name}: {reason}")
    for measurement in phase.measurements:
        for row in measurement.rows:
            result.reasons.setdefault(row.key, reason)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


async def run(bench: Bench, peers: Sequence[Peer], report: Path, page: Path | None) -> None:
    """Measure all, and write after each phase, so that a run cut short leaves what it has."""
    machine = describe_machine()
    _say(f"{machine}")
    results = {peer.name: EngineResult(name=peer.name, notes=peer.notes) for peer in peers}
    for phase in bench.phases:
        ours = [peer for peer in peers if peer.name == OURS]
        for peer in ours if phase.is_of_ours else (*peers, *ours):
            await bench.measure_phase(peer, phase, results[peer.name])
        today = datetime.now(UTC).strftime("%Y-%m-%d")
        done = PeerRun(date=today, machine=machine, engines=tuple(results.values()))
        write_report(done, report, page)


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
        help="in this order",
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
