"""How many ranks a model is divided among."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lora_serve.config.setting import require_at_least, require_choices, setting
from lora_serve.errors import ConfigError

NCCL = "nccl"
BACKENDS = ("auto", "shared_memory", "gloo", NCCL)
NUM_SEGMENTS = 8  # of --tensor-parallel-reduce segments: part of the numerics
GATHER, SEGMENTS, ALL_REDUCE = "gather", "segments", "all-reduce"


@dataclass(frozen=True, slots=True)
class Reduce:
    """How attention's output and the MLP's are computed.

    name: as --tensor-parallel-reduce has it. num_segments: how many sums are added up to one
    output; 1 where whole rows are summed. num_ranks_in_answers: how many ranks answers depend on; 1
    where they are the same at any number.
    """

    name: str
    num_segments: int = 1
    num_ranks_in_answers: int = 1

    @property
    def adds_segments(self) -> bool:
        return self.num_segments > 1

    def __str__(self) -> str:
        return f"--tensor-parallel-reduce {self.name}"


WHOLE_ROWS = Reduce(GATHER)
REDUCES: Mapping[str, Callable[[int], Reduce]] = {  # of so many ranks
    GATHER: lambda _: WHOLE_ROWS,
    SEGMENTS: lambda _: Reduce(SEGMENTS, NUM_SEGMENTS),
    ALL_REDUCE: lambda size: Reduce(ALL_REDUCE, size, num_ranks_in_answers=size),
}


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
        choices=BACKENDS,
    )

    tensor_parallel_reduce: str = setting(
        "How attention's output and the MLP's are computed: gather sums whole rows; segments adds "
        f"the sums of {NUM_SEGMENTS} parts of each row, in one order at any number of ranks; "
        "all-reduce adds those of each rank's part, so that answers depend on that number.",
        GATHER,
        choices=tuple(REDUCES),
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
        count = self.reduce.num_segments
        if self.reduce.adds_segments and count % size:
            fitting = [str(each) for each in range(1, count) if not count % each]
            raise ConfigError(
                f"{self.reduce}: {size} ranks would cut some of the {count} segments; choose "
                f"{', '.join(fitting)} or {count} ranks, or {WHOLE_ROWS}"
            )

    @property
    def reduce(self) -> Reduce:
        return REDUCES[self.tensor_parallel_reduce](self.tensor_parallel_size)


def above_limit(num_ranks: int, limit: str) -> ConfigError:
    """More ranks than there are of something that each needs one of."""
    return ConfigError(f"--tensor-parallel-size {num_ranks} is above {limit}; lower it")
