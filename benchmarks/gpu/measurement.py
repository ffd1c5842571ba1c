"""Fills a report, most important things first, as long as there is time.

Every figure is written when it is found, so a run that is killed loses none; and the next run of
the same code on the same card measures what is missing.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from benchmarks.common.limits import layer_weights, vocabulary_weights
from benchmarks.gpu.block_copies import time_block_copies
from benchmarks.gpu.ceilings import measure_ceilings
from benchmarks.gpu.engine import MeasuredEngine, Settings
from benchmarks.gpu.kernels import Works, time_work
from benchmarks.gpu.peer import OURSELVES, PEERS, PeerTiming, time_peer
from benchmarks.gpu.report import EngineTimings, Report, ShapeReport, begin_report
from benchmarks.gpu.shapes import SHAPES, write_config
from benchmarks.gpu.timing import Stopwatch
from lora_serve.bench.machine import PACKAGES, describe_machine
from lora_serve.ops.select import choose_ops
from lora_serve.worker.device import open_device

BF16_BYTES = 2
T = TypeVar("T")


class OutOfTimeError(Exception):
    """Time ran out in the middle of a part."""


class Measurement:
    """failed: the parts that did."""

    def __init__(self, device_setting: str, minutes: float, directory: Path, out: Path) -> None:
        """Directory: for configs. out: where the report goes, and where an earlier one may be."""
        device = open_device(device_setting)
        self.failed: list[str] = []
        self._out = out
        self._device = device.torch_device
        self._is_card = self._device.type == "cuda"
        self._directory = directory
        self._until = time.monotonic() + 60 * minutes
        self._watch = Stopwatch(self._device)
        machine = describe_machine((*PACKAGES, "triton"))
        ceilings = measure_ceilings(self._device, self._watch)
        self.report: Report = begin_report(out, device.name, machine, ceilings)

    def measure(self, shapes: Iterable[str]) -> None:
        """The first shape stands for all in what is asked only once."""
        for index, name in enumerate(shapes):
            shape = self._shape_report(name)
            self._measure_engines(shape)
            if index == 0:
                self._measure_peers(name)
                self._measure_separate_launches(shape)
            self.attempt(f"{name}: kernels", partial(self._time_kernels, shape))

    def attempt(self, name: str, part: Callable[[], None]) -> None:
        """Unless it was done before, or there is no time; whatever happens to it is noted."""
        if name in self.report.finished:
            return
        if time.monotonic() > self._until:
            self.report.notes.append(f"Left out, for want of time: {name}.")
            return
        print(f"{name} …", flush=True)
        try:
            part()
            self.report.finished.append(name)
        except OutOfTimeError:
            self.report.notes.append(f"Cut short, for want of time: {name}.")
        except Exception as error:
            traceback.print_exc()
            self.failed.append(name)
            self.report.notes.append(f"Failed: {name}: {error!r}.")
        gc.collect()  # an engine and its loader know each other
        if self._is_card:
            torch.cuda.empty_cache()
        self.write()

    def write(self) -> Path:
        return self.report.write(self._out)

    def _shape_report(self, name: str) -> ShapeReport:
        for found in self.report.shapes:
            if found.name == name:
                return found
        shape = SHAPES[name]
        layers, vocabulary = layer_weights(shape), vocabulary_weights(shape)
        new = ShapeReport(name, BF16_BYTES * (layers + vocabulary), 2.0 * layers)
        self.report.shapes.append(new)
        return new

    def _measure_engines(self, shape: ShapeReport) -> None:
        """Measure it as it is served, and with other settings where adapters are none or 32."""
        served, lengths, cases = self._settings(), self._prompt_lengths(), self._cases()
        few, counts = self._few_cases(), self._adapter_counts()
        exact = replace(served, batch_invariant=True)
        serial = replace(served, async_scheduling=False)
        for what, *arguments in (
            ("engine", shape.served, served, lengths, cases, counts),
            ("--batch-invariant", shape.exact, exact, lengths, few, ()),
            ("--no-async-scheduling", shape.serial, serial, (), few, ()),
        ):
            part = partial(self._time_engine, shape.name, *arguments)
            self.attempt(f"{shape.name}: {what}", part)

    def _measure_separate_launches(self, shape: ShapeReport) -> None:
        settings = replace(self._settings(), overlap_launches=False)
        few = self._few_cases()
        part = partial(self._time_engine, shape.name, shape.separate, settings, (), few, ())
        self.attempt(f"{shape.name}: --no-overlap-launches", part)

    def _time_engine(
        self,
        name: str,
        timings: EngineTimings,
        settings: Settings,
        lengths: Iterable[int],
        cases: Iterable[tuple[int, int]],
        adapter_counts: Iterable[int],
    ) -> None:
        engine = MeasuredEngine(write_config(name, self._directory / name), SHAPES[name], settings)
        try:
            timings.load_seconds, timings.num_blocks = engine.load_seconds, engine.info.num_blocks
            missing = [length for length in lengths if length not in timings.prefill]
            for length in self._while_time(missing):
                timings.prefill[length] = engine.prefill_tokens_per_second(length, 4)
            prompt_len, num_steps = (512, 32) if self._is_card else (16, 3)
            found = {(timing.num_requests, timing.num_adapters) for timing in timings.decode}
            for case in self._while_time([case for case in cases if case not in found]):
                timings.decode.append(engine.decode(*case, prompt_len, num_steps))
            told = {timing.num_adapters for timing in timings.first_token}
            for count in self._while_time([n for n in adapter_counts if n not in told]):
                timings.first_token.append(engine.first_token(count, prompt_len))
        finally:
            engine.close()

    def _measure_peers(self, name: str) -> None:
        self.report.peer_shape = name
        self.attempt(f"{name}: lora-serve beside peers", partial(self._time_ourselves, name))
        for peer in PEERS:
            self.attempt(f"{name}: {peer}", partial(self._time_peer, peer, name))

    def _time_peer(self, peer: str, name: str) -> None:
        config = write_config(name, self._directory / name)
        self.report.peers.append(time_peer(peer, config, self._device, *self._peer_sizes()))

    def _time_ourselves(self, name: str) -> None:
        """The same batch as the peers'."""
        num_requests, *lengths = self._peer_sizes()
        settings = replace(self._settings(), max_adapters=num_requests)
        engine = MeasuredEngine(write_config(name, self._directory / name), SHAPES[name], settings)
        try:
            rates = [
                engine.answered_tokens_per_second(num_requests, num_adapters, *lengths)
                for num_adapters in (0, num_requests)
            ]
        finally:
            engine.close()
        self.report.peers += [
            PeerTiming(who, num_requests, rate) for who, rate in zip(OURSELVES, rates, strict=True)
        ]

    def _time_kernels(self, shape: ShapeReport) -> None:
        exact_ops = choose_ops((), self._device, batch_invariant=True)
        ops = choose_ops((), self._device)
        works = Works(ops, exact_ops, SHAPES[shape.name], torch.bfloat16)
        rows = ((1, 8, 32, 256), 2048) if self._is_card else ((1, 4), 32)
        found = {timing.name for timing in shape.kernels}
        for work in self._while_time(works.all(*rows)):
            if work.name not in found:
                shape.kernels.append(time_work(work, self._watch, self.report.ceilings))
        shape.kernels += time_block_copies(ops, SHAPES[shape.name], torch.bfloat16)

    def _while_time(self, works: Iterable[T]) -> Iterator[T]:
        """One by one, and what was found of each is written before the next."""
        for work in works:
            if time.monotonic() > self._until:
                raise OutOfTimeError
            yield work
            self.write()

    def _settings(self) -> Settings:
        if self._is_card:
            return Settings("cuda", 256, 8192, 4096, max_adapters=256)
        return Settings("cpu", 8, 64, 256, 4, num_blocks=128, async_scheduling=True)

    def _peer_sizes(self) -> tuple[int, int, int]:
        """Requests, tokens of a prompt, tokens of an answer."""
        return (32, 128, 64) if self._is_card else (2, 8, 4)

    def _adapter_counts(self) -> tuple[int, ...]:
        """Around what others have slots for, and up to all."""
        return (1, 8, 9, 32, 64, 65, 256) if self._is_card else (1, 4)

    def _prompt_lengths(self) -> tuple[int, ...]:
        return (128, 1024, 4000) if self._is_card else (32,)

    def _cases(self) -> list[tuple[int, int]]:
        """(requests, adapters), in the order of adapters, since those that are loaded stay."""
        if not self._is_card:
            return [(1, 0), (4, 0), (4, 1), (4, 4)]
        requests = (1, 8, 32, 64, 128, 256)
        return [(n, adapters) for adapters in (0, 1, 8, 32, 256) for n in requests if adapters <= n]

    def _few_cases(self) -> list[tuple[int, int]]:
        return [(n, adapters) for n, adapters in self._cases() if adapters in (0, 32)]
