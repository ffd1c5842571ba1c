"""Whether a model can be divided among ranks on this machine, and what each of them would hold."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from lora_serve.cli.doctor_finding import Finding, Level
from lora_serve.config import EngineConfig, ParallelConfig
from lora_serve.config.model import AUTO
from lora_serve.config.parallel import WHOLE_ROWS
from lora_serve.distributed.shares import RankPlace
from lora_serve.errors import ConfigError
from lora_serve.models.base import ModelSpec, num_parameters
from lora_serve.observability.sizes import shown_bytes
from lora_serve.ops.cpu.numa import numa_nodes
from lora_serve.ops.cpu.threads import default_num_threads
from lora_serve.worker.device import names_gpu
from lora_serve.worker.rank_cards import check_places

SUBJECT = "ranks"


def place_findings(num_ranks: int) -> Iterator[Finding]:
    """Whether there is a core for each rank, or a GPU where torch sees any."""
    try:
        check_places(EngineConfig(parallel=ParallelConfig(tensor_parallel_size=num_ranks)))
    except ConfigError as error:
        yield Finding(SUBJECT, str(error), Level.ERROR, "divide the model among fewer")
        return
    if names_gpu(AUTO):
        yield Finding(SUBJECT, f"{num_ranks}, each on one of {torch.cuda.device_count()} GPUs")
        return
    cores, num_nodes = default_num_threads(), len(numa_nodes())
    threads = cores // num_ranks
    told = f"{num_ranks} on {cores} cores, each of {threads} thread{'s' * (threads > 1)}"
    if num_nodes > 1:
        remedy = "keep each on its own: lora-serve serve --cpu-ranks auto …"
        yield Finding(SUBJECT, f"{told}; there are {num_nodes} NUMA nodes", Level.HINT, remedy)
    else:
        yield Finding(SUBJECT, told)


def share_findings(num_ranks: int, spec: ModelSpec, value_bytes: int) -> Iterator[Finding]:
    """Whether the model can be divided so, and what the rank with most of it has."""
    try:
        spec.divided(num_ranks, WHOLE_ROWS)
    except ConfigError as error:
        yield Finding(SUBJECT, str(error), Level.ERROR, "divide the model among fewer")
        return
    weights = num_parameters(spec) * value_bytes
    places = RankPlace(0, num_ranks).all()
    num_heads = sum(layer.num_kv_heads for layer in spec.kv_specs())
    most = max(
        sum(layer.of_rank(place).num_kv_heads for layer in spec.kv_specs()) for place in places
    )
    yield Finding(
        SUBJECT,
        f"each holds about {shown_bytes(weights // num_ranks)} of the weights, and of the KV of "
        f"each token {most / num_heads:.0%} at most",
    )
