"""python -m benchmarks.gpu: the whole measurement in one command, made for under ten minutes.

Parts that do not fit in --minutes are left out and named, and so is a part that fails, because
time on a card is short: the others still run, what they found is written after each of them, and
the exit status is 1. --device cpu --shapes tiny tries the script out; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.gpu.ceilings import Ceilings, measure_ceilings
from benchmarks.gpu.engine import DecodeTiming, MeasuredEngine, Settings
from benchmarks.gpu.kernels import Works, time_works
from benchmarks.gpu.peer import time_peers
from benchmarks.gpu.report import Report, ShapeReport
from benchmarks.gpu.shapes import SHAPES, write_config
from benchmarks.gpu.timing import Stopwatch
from benchmarks.limits import layer_weights, vocabulary_weights
from lora_serve.bench.machine import describe_machine
from lora_serve.ops.backends import choose_ops
from lora_serve.worker.device import open_device

BF16_BYTES = 2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["7B", "0.5B", "3B"])
    parser.add_argument("--minutes", type=float, default=8.5, help="begin nothing new after them")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    return parser.parse_args()


class Measurement:
    """Fills a report, most important things first, as long as there is time."""

    def __init__(self, device_setting: str, minutes: float, directory: Path, out: Path) -> None:
        """Directory: for configs. out: where the report goes."""
        device = open_device(device_setting)
        self.failed: list[str] = []
        self._out = out
        self._device = device.torch_device
        self._is_card = self._device.type == "cuda"
        self._directory = directory
        self._until = time.monotonic() + 60 * minutes
        self._watch = Stopwatch(self._device)
        self.report = Report(
            device.name, describe_machine(), measure_ceilings(self._device, self._watch)
        )

    @property
    def ceilings(self) -> Ceilings:
        return self.report.ceilings

    def attempt(self, name: str, part: Callable[[], None]) -> None:
        if time.monotonic() > self._until:
            self.report.notes.append(f"Left out, for want of time: {name}.")
            return
        print(f"{name} …", flush=True)
        try:
            part()
        except Exception as error:
            traceback.print_exc()
            self.failed.append(name)
            self.report.notes.append(f"Failed: {name}: {error!r}.")
        gc.collect()  # an engine and its loader know each other
        if self._is_card:
            torch.cuda.empty_cache()
        self.report.write(self._out)

    def measure_shape(self, name: str) -> None:
        """The engine as it is served, its kernels, then the engine with other settings."""
        shape = SHAPES[name]
        layers, vocabulary = layer_weights(shape), vocabulary_weights(shape)
        result = ShapeReport(name, 0.0, 0, BF16_BYTES * (layers + vocabulary), 2.0 * layers)
        self.report.shapes.append(result)
        self.attempt(f"{name}: engine", lambda: self._measure_engine(result))
        self.attempt(f"{name}: kernels", lambda: self._measure_kernels(result))
        self.attempt(f"{name}: --batch-invariant", lambda: self._measure_exact(result))
        self.attempt(f"{name}: --no-async-scheduling", lambda: self._measure_serial(result))

    def measure_peers(self, name: str) -> None:
        def measure() -> None:
            directory = write_config(name, self._directory / name)
            sizes = (32, 128, 64) if self._is_card else (2, 8, 4)
            timings, note = time_peers(directory, self._device, *sizes)
            self.report.peers = timings
            self.report.peer_shape = name
            self.report.notes += [note] if note else []

        self.attempt(f"{name}: transformers", measure)

    def _measure_engine(self, result: ShapeReport) -> None:
        engine = self._open(result.name, self._settings())
        try:
            result.load_seconds, result.num_blocks = engine.load_seconds, engine.info.num_blocks
            for prompt_len in self._prompt_lengths():
                result.prefill[prompt_len] = engine.prefill_tokens_per_second(prompt_len, 4)
            for num_requests, num_adapters in self._cases():
                result.decode.append(self._decode(engine, num_requests, num_adapters))
        finally:
            engine.close()

    def _measure_exact(self, result: ShapeReport) -> None:
        engine = self._open(result.name, replace(self._settings(), batch_invariant=True))
        try:
            for prompt_len in self._prompt_lengths():
                rate = engine.prefill_tokens_per_second(prompt_len, 4)
                result.exact_prefill[prompt_len] = rate
            for num_requests, num_adapters in self._cases():
                if num_adapters in (0, 32):
                    timing = self._decode(engine, num_requests, num_adapters)
                    result.exact_decode.append(timing)
        finally:
            engine.close()

    def _measure_serial(self, result: ShapeReport) -> None:
        """What overlapping hides: the host's time between two steps."""
        engine = self._open(result.name, replace(self._settings(), async_scheduling=False))
        try:
            for num_requests, num_adapters in self._cases():
                if num_adapters in (0, 32):
                    timing = self._decode(engine, num_requests, num_adapters)
                    result.serial_decode.append(timing)
        finally:
            engine.close()

    def _measure_kernels(self, result: ShapeReport) -> None:
        works = Works(choose_ops((), self._device), SHAPES[result.name], torch.bfloat16)
        rows = ((1, 8, 32, 256), 2048) if self._is_card else ((1, 4), 32)
        result.kernels = time_works(works.all(*rows), self._watch, self.ceilings)

    def _open(self, name: str, settings: Settings) -> MeasuredEngine:
        return MeasuredEngine(write_config(name, self._directory / name), SHAPES[name], settings)

    def _decode(self, engine: MeasuredEngine, num_requests: int, num_adapters: int) -> DecodeTiming:
        prompt_len, num_steps = (512, 32) if self._is_card else (16, 3)
        return engine.decode(num_requests, num_adapters, prompt_len, num_steps)

    def _settings(self) -> Settings:
        if self._is_card:
            return Settings("cuda", 256, 8192, 4096, max_adapters=256)
        return Settings("cpu", 8, 64, 256, 4, num_blocks=128, async_scheduling=True)

    def _prompt_lengths(self) -> tuple[int, ...]:
        return (128, 1024, 4000) if self._is_card else (32,)

    def _cases(self) -> list[tuple[int, int]]:
        """(requests, adapters), in the order of adapters, since those that are loaded stay."""
        if not self._is_card:
            return [(1, 0), (4, 0), (4, 1), (4, 4)]
        requests = (1, 8, 32, 64, 128, 256)
        return [(n, adapters) for adapters in (0, 1, 8, 32, 256) for n in requests if adapters <= n]


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as directory:
        measurement = Measurement(
            arguments.device, arguments.minutes, Path(directory), arguments.out
        )
        for name in arguments.shapes:
            measurement.measure_shape(name)
        measurement.measure_peers(arguments.shapes[0])
    page = measurement.report.write(arguments.out)
    print(page.read_text())
    print(f"written: {page} and {page.with_suffix('.json')}")
    if measurement.failed:
        sys.exit(f"failed: {', '.join(measurement.failed)}")


if __name__ == "__main__":
    main()
