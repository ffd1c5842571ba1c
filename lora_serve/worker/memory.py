"""How much of a device's memory is left for KV. Arithmetic only; who measures stands elsewhere.

On a GPU weights, a step's own tensors, adapters and KV come out of one budget, so that no load and
no step can run out of memory later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lora_serve.errors import ConfigError
from lora_serve.model_info import Vocabulary
from lora_serve.models.base import LinearLayout, vocabulary_linears

CPU_DEFAULT_BYTES = 4 * 2**30
_GIB = 2**30
_LORA_RANK_STEP = 16


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes for the KV cache; told: the setting that made it so, for errors."""

    num_bytes: int
    told: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """Bytes. free: before anything was loaded. step: the most that one step takes beside the rest.

    graphs: what recorded steps hold for good. adapters: what as many of the largest as may be
    resident take.
    """

    free: int
    utilization: float
    weights: int
    step: int
    graphs: int
    adapters: int

    def room(self) -> Room:
        """What is left of the budget.

        Raises:
            ConfigError: when nothing is, with each part's share.
        """
        taken = self.weights + self.step + self.graphs + self.adapters
        left = int(self.free * self.utilization) - taken
        if left <= 0:
            raise ConfigError(
                f"no memory is left for KV: {self}; raise --gpu-memory-utilization, or lower "
                "--max-num-batched-tokens, --max-cpu-loras or --max-lora-rank"
            )
        return Room(left, str(self))

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "a step": self.step,
            "recorded steps": self.graphs,
            "adapters": self.adapters,
        }
        shares = ", ".join(f"{size / _GIB:.2f} GiB for {name}" for name, size in parts.items())
        return (
            f"--gpu-memory-utilization {self.utilization} of {self.free / _GIB:.2f} GiB free, "
            f"less {shares},"
        )


def cpu_room(available_bytes: int, utilization: float, most_needed_bytes: int) -> Room:
    """A share of what is free, but no more than a modest default or than could ever be used.

    most_needed_bytes: what max_num_seqs requests with the longest prompts take.
    """
    share = int(available_bytes * utilization)
    return Room(
        min(share, CPU_DEFAULT_BYTES, most_needed_bytes),
        f"--gpu-memory-utilization {utilization} of {available_bytes} free bytes",
    )


def largest_vocabulary_bytes(
    vocabulary: Vocabulary | None, lora_rank: int, value_bytes: int, most_bytes: int
) -> int:
    """Both matrices whole, and a delta of the highest rank on each; at most `most_bytes`."""
    if vocabulary is None:
        return 0
    copies = 2 * vocabulary.size * vocabulary.hidden_size * value_bytes
    deltas = largest_adapter_bytes(vocabulary_linears(vocabulary), lora_rank, value_bytes)
    return min(most_bytes, copies + deltas)


def largest_adapter_bytes(linears: Sequence[LinearLayout], lora_rank: int, value_bytes: int) -> int:
    """A and B of the highest rank on every projection, the rank as kernels may round it up."""
    lora_rank = -(-lora_rank // _LORA_RANK_STEP) * _LORA_RANK_STEP
    return sum(
        lora_rank * (len(linear.columns) + out_features) * value_bytes
        for linear in linears
        for _, out_features in linear.projections
    )
