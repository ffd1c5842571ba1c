"""How many ranks a model is divided among."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.config.setting import require_at_least, require_choices, setting
from lora_serve.errors import ConfigError

NCCL = "nccl"
GATHERS = ("auto", "shared_memory", "gloo", NCCL)
NUM_SEGMENTS = 8  # of --tensor-parallel-reduce segments: part of the numerics
GATHER, SEGMENTS, ALL_REDUCE = "gather", "segments", "all-reduce"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """How many ranks a model is divided among, and how they gather."""

    tensor_parallel_size: int = setting(
        "Processes that the model is divided among, each with its own memory and cores, or a GPU; "
        "answers are the same bits at any number, unless --tensor-parallel-reduce says otherwise.",
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
        size = self.tensor_parallel_size
        require_at_least(1, "--tensor-parallel-size", size)
        if self.tensor_parallel_reduce == SEGMENTS and NUM_SEGMENTS % size:
            fitting = [str(each) for each in range(1, NUM_SEGMENTS) if not NUM_SEGMENTS % each]
            raise ConfigError(
                f"--tensor-parallel-reduce {SEGMENTS}: {size} ranks would cut some of the "
                f"{NUM_SEGMENTS} segments; choose {', '.join(fitting)} or {NUM_SEGMENTS} ranks, or "
                f"--tensor-parallel-reduce {GATHER}"
            )

    @property
    def num_segments(self) -> int:
        """How many sums make one of attention's outputs, or of the MLP's."""
        nums = {GATHER: 1, SEGMENTS: NUM_SEGMENTS, ALL_REDUCE: self.tensor_parallel_size}
        return nums[self.tensor_parallel_reduce]

    @property
    def num_ranks_in_answers(self) -> int:
        """How many ranks answers depend on: 1 where they are the same at any number."""
        return self.tensor_parallel_size if self.tensor_parallel_reduce == ALL_REDUCE else 1


def above_limit(num_ranks: int, limit: str) -> ConfigError:
    """More ranks than there are of something that each needs one of."""
    return ConfigError(f"--tensor-parallel-size {num_ranks} is above {limit}; lower it")
