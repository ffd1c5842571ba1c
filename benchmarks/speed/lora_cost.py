"""python -m benchmarks.speed.lora_cost: what adapters cost a step, as table and JSON.

The kernels of whole steps of Qwen2.5-0.5B's shape, recorded once and replayed: no Python lies
between them, no server beside them. The one rule: a step and what it is compared with take turns,
so that a neighbour on the machine slows both or neither.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from benchmarks.common.facts import write_facts
from benchmarks.speed.overhead.engine import SHAPES, Shape
from lora_serve.layers.batch import ForwardBatch
from lora_serve.models.base import LinearLayout, Model, ModelSpec
from lora_serve.models.weights import RandomWeights, WeightReader
from lora_serve.ops._cpu import usable_paths
from lora_serve.ops.contract import LoRAPart, Ops, PackedAdapter
from lora_serve.ops.cpu.backend import CpuKernels
from lora_serve.ops.cpu.threads import default_num_threads, pin_threads
from lora_serve.ops.recorded_steps import RecordedWork
from lora_serve.worker.kv_cache import allocate_kv_caches

DTYPE = torch.bfloat16
BLOCK_SIZE = 16
DECODE_CONTEXT = 128
PREFILL_TOKENS = 1024
NUM_ADAPTERS = 8
MAX_TOKENS = max(PREFILL_TOKENS, NUM_ADAPTERS * DECODE_CONTEXT)

HEAD = (
    "| step | against | ms | ms | share of its speed kept | share if bytes read were all |\n"
    "|---|---|--:|--:|--:|--:|"
)


@dataclass(frozen=True, slots=True)
class Step:
    """num_adapters: 0 for none; requests are divided evenly among them."""

    name: str
    num_requests: int
    tokens_each: int
    num_adapters: int

    @property
    def num_rows(self) -> int:
        return self.num_requests * self.tokens_each


PREFILL, PREFILL_ADAPTER = (
    Step(name, 1, PREFILL_TOKENS, count)
    for name, count in (("prefill of 1,024", 0), ("prefill of 1,024, an adapter", 1))
)
DECODE_1, DECODE_1_ADAPTER = (
    Step(name, 1, 1, count) for name, count in (("1 request", 0), ("1 request, an adapter", 1))
)
DECODE_8, DECODE_8_OF_1, DECODE_8_OF_8 = (
    Step(name, NUM_ADAPTERS, 1, count)
    for name, count in (("8 requests", 0), ("8 of one adapter", 1), ("8 of 8 adapters", 8))
)
COMPARISONS = (
    (PREFILL_ADAPTER, PREFILL),
    (DECODE_1_ADAPTER, DECODE_1),
    (DECODE_8_OF_1, DECODE_8),
    (DECODE_8_OF_8, DECODE_8_OF_1),
)


@dataclass(frozen=True, slots=True)
class Cost:
    """Medians over turns; `kept` is the median of the turns' own ratios.

    kept_by_bytes: what would be kept if a step took as long as reading its weights does, for steps
    of few rows; a prefill is bound by products.
    """

    step: str
    against: str
    milliseconds: float
    against_milliseconds: float
    kept: float
    kept_by_bytes: float


class Subject:
    """A model of random weights, its adapters, and steps of both as recordings."""

    def __init__(self, shape: Shape, kernels: CpuKernels, rank: int) -> None:
        self._ops = kernels.ops()
        self._spec = shape.spec(MAX_TOKENS)
        self._model = _random_model(self._spec, self._ops)
        self._adapters = [
            random_adapter(self._spec, self._ops, rank, seed) for seed in range(NUM_ADAPTERS)
        ]
        num_blocks = MAX_TOKENS // BLOCK_SIZE
        self._kv_caches = allocate_kv_caches(
            self._spec.kv_specs(), self._ops, num_blocks, BLOCK_SIZE, DTYPE
        )
        for cache in self._kv_caches:
            cache.zero_()  # decode steps read what no prefill wrote
        self._batches: list[ForwardBatch] = []  # recordings point into them

    def weight_bytes(self, step: Step) -> int:
        """What a step reads of weights: the base model's once, each adapter's once."""
        linears = sum(_outputs(linear) * linear.in_features for linear in self._spec.linears())
        base = (linears + self._spec.vocab_size * self._spec.hidden_size) * DTYPE.itemsize
        return base + sum(adapter.num_bytes for adapter in self._adapters[: step.num_adapters])

    def record(self, step: Step) -> RecordedWork:
        record = self._ops.record
        assert record is not None, "the CPU kernels note their own calls"
        batch = self._batch(step)
        self._batches.append(batch)

        def forward() -> Tensor:
            hidden = self._model.forward(batch, self._kv_caches)
            return self._model.logits(hidden if step.tokens_each == 1 else hidden[-1:])

        return record(forward)

    def _batch(self, step: Step) -> ForwardBatch:
        """Prompts of their own tokens, or the token after DECODE_CONTEXT - 1 others."""
        seq_len = DECODE_CONTEXT if step.tokens_each == 1 else step.tokens_each
        tables = torch.arange(step.num_requests * seq_len // BLOCK_SIZE).int()
        slots = torch.arange(step.num_requests * seq_len).view(step.num_requests, seq_len)
        num_layers = len(self._kv_caches)
        slot_mapping = slots[:, seq_len - step.tokens_each :].reshape(-1)
        plan = self._ops.attention.plan_attention(
            (torch.arange(step.num_requests + 1) * step.tokens_each).int(),
            torch.full((step.num_requests,), seq_len, dtype=torch.int32),
            tables.view(step.num_requests, -1),
            BLOCK_SIZE,
        )
        return ForwardBatch(
            input_ids=torch.arange(step.num_rows) + 1000,
            positions=torch.arange(seq_len - step.tokens_each, seq_len).repeat(step.num_requests),
            slot_mapping=(slot_mapping,) * num_layers,
            attention=(plan,) * num_layers,
            lora=self._ops.adapters.plan_lora(self._segments(step), step.num_rows),
        )

    def _segments(self, step: Step) -> list[tuple[int, int, PackedAdapter]]:
        each = step.num_rows // max(step.num_adapters, 1)
        return [
            (index * each, (index + 1) * each, self._adapters[index])
            for index in range(step.num_adapters)
        ]


def _random_model(spec: ModelSpec, ops: Ops) -> Model:
    weights = WeightReader(RandomWeights(spec.tensor_shapes(), 0, DTYPE), DTYPE)
    return spec.build(weights, ops, spec.rotary_tables(spec.max_positions))


def _outputs(linear: LinearLayout) -> int:
    return sum(outputs for _, outputs in linear.projections)


def random_adapter(spec: ModelSpec, ops: Ops, rank: int, seed: int) -> PackedAdapter:
    """An adapter of all projections of all layers; small, so that its rows stay numbers."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * 0.01).to(DTYPE)

    linears = []
    for linear in spec.linears():
        parts: list[LoRAPart] = []
        start = 0
        for _, outputs in linear.projections:
            a, b = matrix(rank, linear.in_features), matrix(outputs, rank)
            parts.append(LoRAPart(a, b, 2.0, start))
            start += outputs
        linears.append(parts)
    return ops.adapters.pack_adapter(linears)


def take_turns(runs: Sequence[Callable[[], None]], patience_seconds: float) -> list[list[float]]:
    """Seconds of each turn by run; at least three turns, begun by each run in turn."""
    times: list[list[float]] = [[] for _ in runs]
    begin = time.perf_counter()
    while len(times[0]) < 3 or time.perf_counter() - begin < patience_seconds:
        first = len(times[0]) % len(runs)
        for index in [*range(first, len(runs)), *range(first)]:
            start = time.perf_counter()
            runs[index]()
            times[index].append(time.perf_counter() - start)
    return times


def measure(subject: Subject, step: Step, against: Step, patience_seconds: float) -> Cost:
    recordings = [subject.record(step), subject.record(against)]
    for recording in recordings:
        recording.replay()
    own, other = take_turns([recording.replay for recording in recordings], patience_seconds)
    return Cost(
        step.name,
        against.name,
        median(own) * 1e3,
        median(other) * 1e3,
        median(b / a for a, b in zip(own, other, strict=True)),
        subject.weight_bytes(against) / subject.weight_bytes(step),
    )


def table_line(cost: Cost) -> str:
    return (
        f"| {cost.step} | {cost.against} | {cost.milliseconds:.1f} | "
        f"{cost.against_milliseconds:.1f} | {cost.kept:.1%} | {cost.kept_by_bytes:.1%} |"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=default_num_threads())
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--only", default="", help="steps whose name contains this")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each comparison")
    parser.add_argument("--out", type=Path, help="where to write the JSON")
    return parser.parse_args()


@torch.inference_mode()
def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)  # no other pool beside the kernels' own
    kernels = CpuKernels(usable_paths()[0], arguments.threads)
    pin_threads(kernels.native.thread_ids())
    subject = Subject(SHAPES["Qwen2.5-0.5B"], kernels, arguments.rank)
    costs = []
    print(HEAD, flush=True)
    for step, against in COMPARISONS:
        if arguments.only in step.name:
            costs.append(measure(subject, step, against, arguments.seconds))
            print(table_line(costs[-1]), flush=True)
    write_facts(arguments.out, threads=arguments.threads, rank=arguments.rank, costs=costs)


if __name__ == "__main__":
    main()
