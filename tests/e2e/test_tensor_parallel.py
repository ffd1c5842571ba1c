"""A server of two ranks: it gives the answers of one, and lives through the deaths of ranks."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lora_serve.demo.model import DemoPaths
from lora_serve.demo.scenarios import Server, server_flags
from lora_serve.demo.server_process import ServerProcess
from lora_serve.ops.cpu.numa import rank_shares
from lora_serve.ops.cpu.threads import default_num_threads
from tests.e2e.conftest import StartServer
from tests.e2e.metrics import metric, wait_for
from tests.e2e.recording import Prompted, client_for, record_alone
from tests.e2e.test_engine_restart import engine_pid, num_active, whole
from tests.e2e.test_trace import random_ids

PATIENCE = 200  # two processes import torch; on a busy machine that takes minutes
STEP_TIMEOUT = 8

pytestmark = pytest.mark.skipif(
    default_num_threads() < 2, reason="two ranks need two cores, and this machine gives one"
)


@pytest.fixture(scope="module")
def divided_server(
    demo_paths: DemoPaths, start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    flags = (
        *server_flags(Server.CACHED),
        *("--lora-modules", f"alpha={demo_paths.alpha}", f"beta={demo_paths.beta}"),
        *("--tensor-parallel-size", "2", "--cpu-threads", "1", "--cpu-ranks", "auto"),
        *("--step-timeout", str(STEP_TIMEOUT), "--drain-timeout", "1"),
    )
    log_path = tmp_path_factory.mktemp("logs") / "divided.log"
    with start_server(demo_paths.model, log_path, *flags) as process:
        process.wait_until_healthy()
        yield process


def children(pid: int) -> list[int]:
    """What all its threads have started; nothing if it is gone."""
    try:
        tasks = [task / "children" for task in Path(f"/proc/{pid}/task").iterdir()]
        return [int(child) for task in tasks for child in task.read_text().split()]
    except OSError:
        return []


def rank_pid(server: ServerProcess) -> int:
    """The engine's child that is the second rank, once it is there."""

    def ranks() -> list[int]:
        return [
            pid
            for child in children(server.pid)
            for pid in children(child)
            if b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]

    wait_for(lambda: len(ranks()) == 1, "the second rank", PATIENCE)
    return ranks()[0]


def is_gone(pid: int) -> bool:
    """Also as a zombie, which nothing but its parent can end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def test_two_ranks_answer_as_one(
    divided_server: ServerProcess, cold_server: ServerProcess, demo_paths: DemoPaths
) -> None:
    """The base model and both adapters, which the cold server has by names of its own."""
    names = ("lora-serve-demo", "alpha", "beta")
    requests = [Prompted(names[i % 3], random_ids(f"ranks {i}", 90), 16) for i in range(6)]
    paths = {"alpha": demo_paths.alpha, "beta": demo_paths.beta}
    async with client_for(cold_server.base_url) as http:
        for name, path in paths.items():
            fields = {"lora_name": f"whole-{name}", "lora_path": str(path)}
            assert (await http.post("/v1/load_lora_adapter", json=fields)).status_code == 200
        own_names = {"lora-serve-demo": "lora-serve-demo"} | {n: f"whole-{n}" for n in paths}
        alone = [replace(request, model=own_names[request.model]) for request in requests]
        expected = await record_alone(cold_server.base_url, alone)
        for name in paths:
            fields = {"lora_name": f"whole-{name}"}
            assert (await http.post("/v1/unload_lora_adapter", json=fields)).status_code == 200
    async with client_for(divided_server.base_url) as http:
        together = await asyncio.gather(*(whole(http, request) for request in requests))
        again = [await whole(http, request) for request in requests]
        assert (await http.get("/get_world_size")).json() == {"world_size": 2}
    for one, other in zip(together, expected, strict=True):
        assert one.equals(other)
    for one, other in zip(together, again, strict=True):
        assert one.equals(other)


def test_a_rank_stays_on_its_share_of_the_cores(divided_server: ServerProcess) -> None:
    own = {cpu for core in rank_shares(2)[1].cores for cpu in core}
    rank = rank_pid(divided_server)
    assert own < os.sched_getaffinity(0)
    wait_for(lambda: os.sched_getaffinity(rank) == own, f"rank on the CPUs {own}", PATIENCE)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_lost_rank_costs_no_request(
    divided_server: ServerProcess, how: signal.Signals
) -> None:
    server, request = divided_server, Prompted("alpha", random_ids("lost rank", 60), 400)
    restarts = metric(server.base_url, "lora_serve:engine_restarts_total")
    async with client_for(server.base_url) as http:
        before = await whole(http, request)
        engine, rank = engine_pid(server), rank_pid(server)
        answer = asyncio.create_task(whole(http, request.salted("anew")))
        while not await num_active(http):
            await asyncio.sleep(0.01)
        os.kill(rank, how)
        after = await asyncio.wait_for(answer, PATIENCE + STEP_TIMEOUT)
    assert after.equals(before)
    assert metric(server.base_url, "lora_serve:engine_restarts_total") == restarts + 1
    for pid in (engine, rank):
        wait_for(lambda pid=pid: is_gone(pid), f"the end of process {pid}", PATIENCE)  # type: ignore[misc]


def test_no_rank_outlives_its_engine(divided_server: ServerProcess) -> None:
    """Not even one that is stopped, and so cannot end by itself."""
    rank = rank_pid(divided_server)
    os.kill(rank, signal.SIGSTOP)
    os.kill(engine_pid(divided_server), signal.SIGKILL)
    wait_for(lambda: is_gone(rank), "the end of the rank", PATIENCE)
    assert rank_pid(divided_server) != rank, "the next engine's"
