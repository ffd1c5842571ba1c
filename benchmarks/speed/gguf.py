"""Measures GGUF files beside llama.cpp: `python -m benchmarks.speed.gguf`, on a quiet machine.

Both engines serve the same file, of Qwen2.5-0.5B's shape or of a quarter of OLMoE's layers
(`--shape olmoe`), and take turns. Load is the time from the start of a process until it answers, of
a file that was read before: the best of some starts; also of ours with the weights that an earlier
start has kept (`--weights-cache-path`).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.common.environment import as_users_have_it
from benchmarks.common.facts import write_facts
from benchmarks.common.make_checkpoint import OLMOE, QWEN_0_5B, ensure_checkpoint
from benchmarks.peers.__main__ import CACHE, PATIENCE_SECONDS
from benchmarks.peers.environment import Environment, ensure_environment
from benchmarks.peers.llama_cpp import QUANTIZATIONS, LlamaCpp
from benchmarks.peers.measurements import Turns
from benchmarks.peers.ours import LoraServe
from benchmarks.peers.peer import MODEL_NAME, Deployment, Launch
from benchmarks.peers.phases import PHASES
from lora_serve.bench.client import Endpoint
from lora_serve.bench.http_stream import Origin
from lora_serve.bench.server import running_server
from lora_serve.demo.server_process import free_port
from lora_serve.file_identity import file_identity
from lora_serve.models.kept_weights.cache import SUFFIX

SHAPES = {"qwen2.5-0.5b": ("model", QWEN_0_5B), "olmoe": ("olmoe", OLMOE)}
KINDS = {kind: quantization for quantization, kind in QUANTIZATIONS.items()}
MEASUREMENTS = tuple(each for round_ in PHASES[0].rounds[:3] for each in round_)
OURS, THEIRS = LoraServe.name, LlamaCpp.name
KEPT = f"{OURS}, weights kept"
ROWS = ("load", "speed")
Figures = dict[str, dict[str, float]]  # by row, by engine


@dataclass(frozen=True, slots=True)
class Contest:
    """One file of llama.cpp's making.

    deployment: of llama.cpp, which names the file. kept: where servers keep packed weights.
    """

    environment: Environment
    deployment: Deployment
    kept: Path

    def launch(self, engine: str, port: int) -> Launch:
        theirs = LlamaCpp().launch(self.environment, self.deployment, port)
        if engine == THEIRS:
            return theirs
        file = self._file(theirs)
        ours = replace(self.deployment, checkpoint=file, quantization="")
        launch = LoraServe().launch(self.environment, ours, port)
        if engine == OURS:
            return launch
        flags = ("--weights-cache-path", str(self.kept))
        return replace(launch, command=(*launch.command, *flags))

    def _file(self, theirs: Launch) -> Path:
        return Path(theirs.command[theirs.command.index("--model") + 1])

    async def serve(self, stack: AsyncExitStack, engine: str) -> Endpoint:
        """Start the engine, until the stack ends; it answers when this returns."""
        port = free_port()
        url, log = f"http://127.0.0.1:{port}", self.environment.root / f"gguf-{engine}.log"
        launch = self.launch(engine, port)
        variables = {**as_users_have_it(), **launch.variables}
        await stack.enter_async_context(
            running_server(launch.command, url, log, variables, launch.ready_path, PATIENCE_SECONDS)
        )
        return Endpoint(Origin.parse(url), MODEL_NAME)

    async def loads(self, num_starts: int) -> dict[str, float]:
        """Seconds until each engine answers."""
        best: dict[str, float] = {}
        await self._settle()
        async with AsyncExitStack() as stack:
            await self.serve(stack, KEPT)
            end = time.monotonic() + PATIENCE_SECONDS
            while not list(self.kept.glob(f"*{SUFFIX}")):
                if time.monotonic() > end:
                    raise RuntimeError(f"no weights were kept in {self.kept}; is the disk full?")
                await asyncio.sleep(0.1)
        for _ in range(num_starts):
            for engine in (OURS, KEPT, THEIRS):
                start = time.monotonic()
                async with AsyncExitStack() as stack:
                    await self.serve(stack, engine)
                    seconds = time.monotonic() - start
                best[engine] = min(best.get(engine, seconds), seconds)
        return best

    async def _settle(self) -> None:
        """Wait until the file is old enough for its weights to be kept."""
        file = self._file(LlamaCpp().launch(self.environment, self.deployment, free_port()))
        while file_identity(file.stat()) is None:
            await asyncio.sleep(0.1)

    async def figures(self) -> Figures:
        """What the measurements give, while both servers run."""
        found: Figures = {}
        async with AsyncExitStack() as stack:
            endpoints = {engine: await self.serve(stack, engine) for engine in (OURS, THEIRS)}
            for measurement in MEASUREMENTS:
                turns = {name: Turns(each, measurement) for name, each in endpoints.items()}
                while waiting := [each for each in turns.values() if not each.is_done]:
                    for each in waiting:
                        await each.take()
                for engine, each in turns.items():
                    for key, figure in each.figures().items():
                        found.setdefault(key, {})[engine] = figure.value
        return found


async def contest(
    environment: Environment, deployment: Deployment, num_starts: int, rows: Collection[str]
) -> Figures:
    LlamaCpp().prepare(environment, deployment)
    with tempfile.TemporaryDirectory(prefix="lora-serve-gguf-") as kept:
        one = Contest(environment, deployment, Path(kept))
        loads = {"load": await one.loads(num_starts)} if "load" in rows else {}
        return {**loads, **(await one.figures() if "speed" in rows else {})}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["Q4_K_M", "Q8_0"])
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    args = parser.parse_args()
    environments = Path(os.environ.get("LORA_SERVE_PEERS") or CACHE / "peers")
    environment = Environment(environments / THEIRS)
    ensure_environment(environment.root, LlamaCpp.recipe, LlamaCpp().install)
    directory, shape = SHAPES[args.shape]
    checkpoint = ensure_checkpoint(CACHE / "bench" / directory, shape)
    figures: dict[str, Figures] = {}
    for kind in args.kinds:
        threads = torch.get_num_threads()
        deployment = Deployment(
            checkpoint=checkpoint, quantization=KINDS[kind], num_threads=threads
        )
        figures[kind] = asyncio.run(contest(environment, deployment, args.starts, args.rows))
        for row, by_engine in figures[kind].items():
            print(kind, row, {engine: round(value, 4) for engine, value in by_engine.items()})
    write_facts(args.out, shape=args.shape, figures=figures)


if __name__ == "__main__":
    main()
