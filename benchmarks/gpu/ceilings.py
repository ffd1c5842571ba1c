"""What the card can do at best, measured with torch's own plainest operations."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.gpu.timing import Stopwatch


@dataclass(frozen=True, slots=True)
class Ceilings:
    """copy_gb_per_second counts bytes read and bytes written; read_… is of a sum over a buffer."""

    copy_gb_per_second: float
    read_gb_per_second: float
    bf16_tflops: float

    @property
    def gb_per_second(self) -> float:
        return max(self.copy_gb_per_second, self.read_gb_per_second)

    def seconds(self, flops: float, num_bytes: float) -> float:
        """What the nearer limit asks for."""
        return max(flops / (self.bf16_tflops * 1e12), num_bytes / (self.gb_per_second * 1e9))


def measure_ceilings(device: torch.device, watch: Stopwatch) -> Ceilings:
    is_card = device.type == "cuda"
    size, width = (4 << 30, 8192) if is_card else (1 << 20, 64)
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy = 2 * size / watch.seconds(lambda: target.copy_(source))
    read = size / watch.seconds(lambda: source.sum())
    a, b = torch.randn(2, width, width, device=device).bfloat16()
    product = 2.0 * width**3 / watch.seconds(lambda: torch.mm(a, b))
    return Ceilings(copy / 1e9, read / 1e9, product / 1e12)
