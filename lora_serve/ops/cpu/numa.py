"""Which NUMA node each rank runs on, and how its threads and memory are kept there.

Where the system tells of no nodes, the machine is one. Nodes of memory alone have no rank.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from lora_serve.config import EngineConfig, ParallelConfig
from lora_serve.config.parallel import NCCL, above_limit
from lora_serve.config.refusals import Refusals
from lora_serve.errors import ConfigError
from lora_serve.ops.cpu.threads import ROOT, allowed_cpus, cores_of, default_num_threads

logger = logging.getLogger(__name__)

AUTO = "auto"
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # the system call, which libc has no name for
_MPOL_BIND = 2
_WORD_BITS = 64


@dataclass(frozen=True, slots=True)
class NodeShare:
    """Some CPUs of a node, by its number; each of its cores has all of its CPUs side by side.

    num_ranks: that are on this node.
    """

    node: int
    cores: tuple[tuple[int, ...], ...]
    num_ranks: int = 1


def numa_nodes(root: Path = ROOT) -> list[NodeShare]:
    """The nodes of the CPUs that this process may use. root: where /sys is."""
    allowed, nodes = allowed_cpus(), []
    for path in (root / "sys/devices/system/node").glob("node[0-9]*"):
        cpus = _listed((path / "cpulist").read_text()) & allowed
        if cpus:
            nodes.append(NodeShare(int(path.name.removeprefix("node")), cores_of(cpus, root)))
    nodes.sort(key=lambda node: node.node)
    return nodes or [NodeShare(0, cores_of(allowed, root))]


def check_cores(parallel: ParallelConfig) -> None:
    """Refuse ranks that this machine's cores cannot run.

    Raises:
        ConfigError: with a line for each reason.
    """
    refusals = Refusals()
    size, cores = parallel.tensor_parallel_size, default_num_threads()
    if parallel.tensor_parallel_backend == NCCL:
        refusals.note(
            ConfigError(
                f"--tensor-parallel-backend {NCCL} is between GPUs, and ranks are on the CPU here; "
                "leave it out, or add --device cuda"
            )
        )
    if size > cores:
        plural = "s" * (cores != 1)
        refusals.note(above_limit(size, f"the {cores} core{plural} that may be used"))
    elif parallel.cpu_ranks == AUTO:
        with refusals.noted():
            rank_shares(size)
    refusals.raise_noted()


def rank_shares(world_size: int, root: Path = ROOT) -> list[NodeShare]:
    """The cores of each rank: as many ranks on each node, which divide its cores.

    Raises:
        ConfigError: the ranks cannot be divided so.
    """
    nodes, flag = numa_nodes(root), f"--tensor-parallel-size {world_size}"
    each, rest = divmod(world_size, len(nodes))
    if rest:
        raise ConfigError(
            f"{flag} does not put as many ranks on each of the {len(nodes)} NUMA nodes, as "
            "--cpu-ranks auto does; choose a multiple, or leave it out"
        )
    shares = []
    for node in nodes:
        if len(node.cores) < each:
            raise ConfigError(
                f"{flag} puts {each} ranks on NUMA node {node.node}, of which {len(node.cores)} "
                f"core{'s' * (len(node.cores) != 1)} may be used; lower it"
            )
        bounds = [len(node.cores) * rank // each for rank in range(each + 1)]
        shares += [
            NodeShare(node.node, node.cores[first:end], each) for first, end in pairwise(bounds)
        ]
    return shares


def with_ranks_of_nodes(config: EngineConfig, root: Path = ROOT) -> EngineConfig:
    """The config with a rank for each node, where --cpu-ranks auto leaves the number open."""
    parallel = config.parallel
    if parallel.cpu_ranks != AUTO or parallel.tensor_parallel_size > 1:
        return config
    parallel = replace(parallel, tensor_parallel_size=len(numa_nodes(root)))
    return replace(config, parallel=parallel)


def with_threads_of(config: EngineConfig, shares: list[NodeShare]) -> EngineConfig:
    """The config with as many threads for each rank as the smallest share has cores."""
    if config.model.cpu_threads is not None:
        return config
    least = min(len(share.cores) for share in shares)
    threads = max(1, min(least, default_num_threads() // len(shares)))
    return replace(config, model=replace(config.model, cpu_threads=threads))


def node_free_bytes(share: NodeShare, root: Path = ROOT) -> int:
    """What one of the node's ranks may still take of its memory, files in memory among it.

    Without an end where the system does not tell.
    """
    path = root / f"sys/devices/system/node/node{share.node}/meminfo"
    if not path.is_file():
        return sys.maxsize
    fields = dict(line.split(":", 1) for line in path.read_text().splitlines())
    sizes = {name.split()[-1]: int(size.split()[0]) for name, size in fields.items()}
    free = sizes["MemFree"] + sizes.get("Active(file)", 0) + sizes.get("Inactive(file)", 0)
    return free * 1024 // share.num_ranks


def bind_thread(share: NodeShare) -> None:
    """Keep the calling thread, and all that it starts from now on, on these cores and this memory.

    Where a container may not choose memory, it is taken as threads first write it: from their node.
    """
    os.sched_setaffinity(0, {cpu for core in share.cores for cpu in core})
    if not _bind_memory(share.node):
        logger.warning(
            "memory is not bound to NUMA node %d: set_mempolicy is not allowed; add the capability "
            "SYS_NICE to the container",
            share.node,
        )


def _bind_memory(node: int) -> bool:
    """Take memory from this node alone; whether the system allows that."""
    number = _SET_MEMPOLICY.get(platform.machine())
    if number is None:
        return False
    mask = (ctypes.c_uint64 * (node // _WORD_BITS + 1))()
    mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
    call: Callable[..., int] = ctypes.CDLL(None).syscall
    # The system reads one bit less than it is told of.
    return call(number, _MPOL_BIND, mask, len(mask) * _WORD_BITS + 1) == 0


def _listed(text: str) -> set[int]:
    """The numbers of a list as the system writes it: "0-3,8,10-11"."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers |= set(range(int(first), int(last or first) + 1))
    return numbers
