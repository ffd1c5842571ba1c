"""What the machine can do at best: how fast it reads memory, and multiplies in bf16.

Measured with all cores, as the best of many short turns; no engine can be faster than that.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.common.make_checkpoint import ModelShape
from lora_serve.ops.quantization import CodeFormat

READ_BYTES = 512 * 2**20  # far above any cache
ROWS, INNER, COLUMNS = 1024, 896, 4864  # the products that a 1,024-token prompt needs most
BF16_BYTES = 2
RANK = 16  # of the adapters that are measured, on all projections


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLimits:
    """library_gflops: torch's own product of a large bf16 matrix, beside the peak of the units.

    gflops and gb_per_second: the highest rates seen, by whichever way.
    """

    gflops: float
    gb_per_second: float
    library_gflops: float

    def best_of(self, other: MachineLimits) -> MachineLimits:
        """What the machine can do is the most it was seen to do."""
        return MachineLimits(
            gflops=max(self.gflops, other.gflops),
            gb_per_second=max(self.gb_per_second, other.gb_per_second),
            library_gflops=max(self.library_gflops, other.library_gflops),
        )

    def prefill_seconds(self, shape: ModelShape, num_tokens: int, with_adapter: bool) -> float:
        """Products of all layers for each token, and of the vocabulary once."""
        each = layer_weights(shape) + with_adapter * adapter_weights(shape)
        flops = 2.0 * (num_tokens * each + vocabulary_weights(shape))
        return flops / (self.gflops * 1e9)

    def step_seconds(self, num_bytes: float) -> float:
        """Reading all weights once: a decode step, as long as it is bound by memory."""
        return num_bytes / (self.gb_per_second * 1e9)


def step_bytes(shape: ModelShape, code_format: CodeFormat | None, num_adapters: int) -> float:
    """What a decode step reads: all weights, in bf16 or in codes, and adapters in bf16."""
    base = layer_weights(shape) + vocabulary_weights(shape)
    adapters = num_adapters * adapter_weights(shape)
    each = BF16_BYTES
    if code_format is not None:
        each = code_format.bits / 8 + BF16_BYTES / code_format.group
    return each * base + BF16_BYTES * adapters


def adapter_weights(shape: ModelShape, targets: tuple[str, ...] = ()) -> int:
    """Count an adapter's weights on the projections of these last names; none means all."""
    widths = sum(
        sum(sizes)
        for name, sizes in shape.projections.items()
        if not targets or name.rpartition(".")[2] in targets
    )
    return shape.num_hidden_layers * RANK * widths


def layer_weights(shape: ModelShape) -> int:
    per_layer = sum(outputs * inputs for outputs, inputs in shape.projections.values())
    return shape.num_hidden_layers * per_layer


def vocabulary_weights(shape: ModelShape) -> int:
    return shape.vocab_size * shape.hidden_size


def measure_limits_briefly() -> MachineLimits:
    """Measure them in a second, for callers that do so again and again."""
    return measure_limits(0.25)


def measure_limits(patience_seconds: float = 2.0) -> MachineLimits:
    """patience_seconds: for each of four rates."""
    memory = torch.ones(READ_BYTES // 8, dtype=torch.int64)
    a = torch.randn(ROWS, INNER).bfloat16()
    b = torch.randn(INNER, COLUMNS).bfloat16()
    flops = 2.0 * ROWS * INNER * COLUMNS
    library = flops / best_seconds(lambda: torch.mm(a, b), patience_seconds) / 1e9
    read = READ_BYTES / best_seconds(lambda: memory.sum(), patience_seconds) / 1e9
    native_gflops, native_gb = _native_limits(memory, patience_seconds)
    return MachineLimits(
        gflops=max(library, native_gflops),
        gb_per_second=max(read, native_gb),
        library_gflops=library,
    )


def best_seconds(run: Callable[[], object], patience_seconds: float = 2.0) -> float:
    """The shortest of the turns that fit in the time, at least three."""
    times: list[float] = []
    run()
    while len(times) < 3 or sum(times) < patience_seconds:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def _native_limits(memory: torch.Tensor, patience_seconds: float) -> tuple[float, float]:
    """Measure by our kernels' own probes, which do nothing but multiply or read; 0 without them."""
    try:
        from lora_serve.ops._cpu import Backend, usable_paths
    except ImportError:
        return 0.0, 0.0
    backend = Backend(usable_paths()[0], torch.get_num_threads())
    bf16, rounds = 2, 100_000
    flops = backend.multiply_only(bf16, rounds)
    multiply = best_seconds(lambda: backend.multiply_only(bf16, rounds), patience_seconds)
    read = best_seconds(lambda: backend.read_only(memory.data_ptr(), READ_BYTES), patience_seconds)
    return flops / multiply / 1e9, READ_BYTES / read / 1e9


if __name__ == "__main__":
    print(measure_limits())
