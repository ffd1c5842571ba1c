from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path

import pytest

from lora_serve.config import EngineConfig, ModelConfig, ParallelConfig
from lora_serve.errors import ConfigError
from lora_serve.ops.cpu import numa
from lora_serve.ops.cpu.numa import (
    NodeShare,
    bind_thread,
    node_free_bytes,
    numa_nodes,
    rank_shares,
    with_ranks_of_nodes,
    with_threads_of,
)

AUTO = EngineConfig(parallel=ParallelConfig(cpu_ranks="auto"))


@pytest.fixture
def two_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four cores of two CPUs on each of nodes 0 and 2, and a node of memory alone."""
    monkeypatch.setattr(numa, "allowed_cpus", lambda: set(range(16)))
    monkeypatch.setattr(numa, "default_num_threads", lambda: 8)
    for node, cpus in {0: "0-3,8-11", 1: "", 2: "4-7,12-15"}.items():
        path = tmp_path / f"sys/devices/system/node/node{node}/cpulist"
        path.parent.mkdir(parents=True)
        path.write_text(cpus + "\n")
    for cpu in range(16):
        path = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        path.parent.mkdir(parents=True)
        path.write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
    return tmp_path


def test_nodes_have_the_cores_that_may_be_used(
    two_sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = NodeShare(0, ((0, 8), (1, 9), (2, 10), (3, 11)))
    assert numa_nodes(two_sockets) == [first, NodeShare(2, ((4, 12), (5, 13), (6, 14), (7, 15)))]
    monkeypatch.setattr(numa, "allowed_cpus", lambda: {1, 2, 9})
    assert numa_nodes(two_sockets) == [NodeShare(0, ((1, 9), (2,)))]


def test_a_machine_that_tells_of_no_nodes_is_one(tmp_path: Path) -> None:
    (node,) = numa_nodes(tmp_path)
    assert {cpu for core in node.cores for cpu in core} == os.sched_getaffinity(0)


def test_each_node_has_as_many_ranks(two_sockets: Path) -> None:
    assert rank_shares(2, two_sockets) == numa_nodes(two_sockets)
    shares = rank_shares(4, two_sockets)
    assert [share.node for share in shares] == [0, 0, 2, 2]
    assert [share.cores for share in shares][1:3] == [((2, 10), (3, 11)), ((4, 12), (5, 13))]
    with pytest.raises(ConfigError, match="3 does not put as many ranks on each of the 2 NUMA"):
        rank_shares(3, two_sockets)
    with pytest.raises(ConfigError, match="10 puts 5 ranks on NUMA node 0, of which 4 cores may"):
        rank_shares(10, two_sockets)


def test_ranks_of_a_node_divide_what_is_free_there(two_sockets: Path) -> None:
    """Files that are cached count as free."""
    meminfo = two_sockets / "sys/devices/system/node/node2/meminfo"
    sizes = {"MemTotal": 9000, "MemFree": 3000, "Active(file)": 500, "Inactive(file)": 700}
    lines = [f"Node 2 {name}:  {size} kB" for name, size in sizes.items()]
    meminfo.write_text("\n".join([*lines, "Node 2 HugePages_Total:     0"]))
    for world_size, free in ((2, 4200), (4, 2100)):
        assert node_free_bytes(rank_shares(world_size, two_sockets)[-1], two_sockets) == free * 1024
    assert node_free_bytes(rank_shares(2, two_sockets)[0], two_sockets) == sys.maxsize, "untold"


def test_ranks_are_as_many_as_nodes_unless_their_number_is_given(two_sockets: Path) -> None:
    assert with_ranks_of_nodes(AUTO, two_sockets).parallel.tensor_parallel_size == 2
    four = EngineConfig(parallel=ParallelConfig(cpu_ranks="auto", tensor_parallel_size=4))
    assert with_ranks_of_nodes(four, two_sockets) == four
    assert with_ranks_of_nodes(EngineConfig(), two_sockets) == EngineConfig()


@pytest.mark.parametrize(("given", "quota", "threads"), [(None, 8, 4), (None, 6, 3), (7, 8, 7)])
def test_a_rank_has_a_thread_for_each_of_its_cores(
    two_sockets: Path, monkeypatch: pytest.MonkeyPatch, given: int | None, quota: int, threads: int
) -> None:
    monkeypatch.setattr(numa, "default_num_threads", lambda: quota)
    config = EngineConfig(model=ModelConfig(cpu_threads=given))
    shares = rank_shares(2, two_sockets)
    assert with_threads_of(config, shares).model.cpu_threads == threads


@pytest.mark.parametrize("allows_memory", [True, False])
def test_a_thread_and_those_it_starts_stay_on_their_node(
    allows_memory: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On this machine's first node; a container may not be allowed to bind memory."""
    if not allows_memory:
        monkeypatch.setattr(numa, "_SET_MEMPOLICY", {})
    node = numa_nodes()[0]
    share, seen, policies = NodeShare(node.node, node.cores[:1]), list[set[int]](), list[str]()

    def look() -> None:
        seen.append(os.sched_getaffinity(0))
        maps = Path("/proc/thread-self/numa_maps")
        if maps.exists():
            policies.append(maps.read_text())

    def bound() -> None:
        bind_thread(share)
        look()
        started = threading.Thread(target=look)
        started.start()
        started.join()

    with caplog.at_level(logging.WARNING):
        thread = threading.Thread(target=bound)  # this one stays free
        thread.start()
        thread.join()
    assert seen == [set(share.cores[0])] * 2
    is_told = f"memory is not bound to NUMA node {share.node}" in caplog.text
    if not allows_memory:
        assert is_told
    assert is_told or all(f" bind:{share.node} " in policy for policy in policies)
