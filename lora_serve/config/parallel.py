"""How many ranks a model is divided among."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.config.setting import require_at_least, require_choices, setting

GATHERS = ("auto", "shared_memory", "gloo", "nccl")
NUM_SEGMENTS = 8  # of --tensor-parallel-reduce segments: part of the numerics
GATHER, SEGMENTS, ALL_REDUCE = "gather", "segments", "all-reduce"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How many ranks a model is divided among, and how they gather."""

    tensor_parallel_size: int = setting(
        "Processes that the model is divided among, each with its own memory and cores, or a GPU; "
        "answers are the same bits at any number.",
        1,
        aliases=("-tp",),
    )
    tensor_parallel_backend: str = setting(
        "How these gather their parts: through shared memory, or gloo (torch.distributed); between "
        "GPUs by NCCL alone. auto takes shared memory on x86-64 and else gloo.",
        "auto",
        choices=GATHERS,
    )

    tensor_parallel_reduce: str = setting(
        "How attention's output and the MLP's are computed: gather sums whole rows; segments adds "
        f"the sums of {NUM_SEGMENTS} parts of each row, in one order at any number of ranks; "
        "all-reduce adds those of each rank's part, so that answers depend on that number.",
        GATHER,
        choices=(GATHER, SEGMENTS, ALL_REDUCE),
    )
    cpu_ranks: str = setting(
        "Where these run: auto spreads them evenly over the NUMA nodes, one on each unless "
        "--tensor-parallel-size is given, and binds each one's threads and memory to its node.",
        "none",
        choices=("none", "auto"),
    )

    def __post_init__(self) -> None:
        require_choices(self)
        require_at_least(1, "--tensor-parallel-size", self.tensor_parallel_size)

    @property
    def num_segments(self) -> int:
        """How many sums make one of attention's outputs, or of the MLP's."""
        nums = {GATHER: 1, SEGMENTS: NUM_SEGMENTS, ALL_REDUCE: self.tensor_parallel_size}
        return nums[self.tensor_parallel_reduce]
