"""kill -9 of the engine process under load, seen by HTTP clients."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from lora_serve.demo.model import DemoPaths
from lora_serve.demo.scenarios import Server, server_flags
from lora_serve.demo.server_process import ServerProcess
from tests.e2e.conftest import StartServer
from tests.e2e.metrics import metric, wait_for
from tests.e2e.recording import Prompted, Recorded, client_for, record_alone
from tests.e2e.test_trace import random_ids

NUM_STORED_BLOCKS = 12


@pytest.fixture(scope="module")
def mortal_server(
    demo_paths: DemoPaths, start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """The last test ends it."""
    directory = tmp_path_factory.mktemp("mortal")
    flags = (
        *server_flags(Server.CACHED),
        *("--lora-modules", f"alpha={demo_paths.alpha}", f"beta={demo_paths.beta}"),
        *("--max-num-seqs", "4", "--max-num-queued-reqs", "40", "--drain-timeout", "1"),
        *("--restart-wait", "0"),  # so that a new request is refused, however quick the restart
        *("--kv-disk-path", str(directory / "kv")),
    )
    with start_server(demo_paths.model, directory / "log", *flags) as process:
        process.wait_until_healthy()
        yield process


def engine_pid(server: ServerProcess) -> int:
    """The server's child that is no resource tracker: it has the most memory."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    return max(
        map(int, children), key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    )


def num_saved(server: ServerProcess) -> float:
    return metric(server.base_url, "lora_serve:kv_tier_saved_blocks_total")


async def whole(http: httpx.AsyncClient, request: Prompted) -> Recorded:
    response = await http.post("/v1/completions", json=request.body(stream=False))
    assert response.status_code == 200, response.text
    recorded = Recorded()
    recorded.add(response.json())
    return recorded


async def are_answered(
    http: httpx.AsyncClient, requests: Sequence[Prompted], expected: Sequence[Recorded]
) -> bool:
    answers = [await whole(http, request) for request in requests]
    return all(one.equals(other) for one, other in zip(answers, expected, strict=True))


async def load_from_memory(http: httpx.AsyncClient, name: str, adapter: Path) -> None:
    """Load an adapter from a body, which holds what its directory does."""
    weights = (adapter / "adapter_model.safetensors").read_bytes()
    body = {
        "lora_name": name,
        "config_dict": json.loads((adapter / "adapter_config.json").read_text()),
        "serialized_named_tensors": [base64.b64encode(weights).decode()],
    }
    response = await http.post("/load_lora_adapter_from_tensors", json=body)
    assert response.status_code == 200, response.text


async def num_active(http: httpx.AsyncClient) -> int:
    """Requests that are being answered."""
    return int((await http.get("/load")).json()["server_load"])


async def stream_until_error(
    http: httpx.AsyncClient, request: Prompted, has_begun: asyncio.Event
) -> dict[str, object]:
    """The error that ended a stream, which then ended as every stream does."""
    lines = []
    async with http.stream("POST", "/v1/completions", json=request.body()) as response:
        async for line in response.aiter_lines():
            has_begun.set()
            lines += [line] if line else []
    assert lines[-1] == "data: [DONE]"
    error = json.loads(lines[-2].removeprefix("data: "))["error"]
    assert isinstance(error, dict)
    return error


async def test_a_killed_engine_costs_begun_streams_and_no_other_request(
    mortal_server: ServerProcess, cold_server: ServerProcess, demo_paths: DemoPaths
) -> None:
    server = mortal_server
    names = ("lora-serve-demo", "alpha", "beta")
    # Adapters of the same files have one digest, so base requests are compared with a cold server.
    requests = [Prompted(names[i % 3], random_ids(f"restart {i}", 200), 24) for i in range(12)]
    long = Prompted("lora-serve-demo", random_ids("long", 50), 6000)
    stored = Prompted("alpha", random_ids("stored", 16 * NUM_STORED_BLOCKS + 1), 8)
    (expected,) = await record_alone(cold_server.base_url, requests[:1])
    has_begun = asyncio.Event()
    async with client_for(server.base_url) as http:
        cold = await whole(http, stored)
        wait_for(lambda: num_saved(server) >= NUM_STORED_BLOCKS, "blocks on the disk")
        before = [await whole(http, request) for request in requests]
        await load_from_memory(http, "memory", demo_paths.alpha)
        of_memory = [replace(r, model="memory") for r in requests if r.model == "alpha"]
        assert await are_answered(http, of_memory, before[1::3])
        stream = asyncio.create_task(stream_until_error(http, long, has_begun))
        await has_begun.wait()
        os.kill(engine_pid(server), signal.SIGSTOP)  # so that it finishes none of what comes now
        answers = [asyncio.create_task(whole(http, request)) for request in requests]
        while await num_active(http) <= len(answers):
            await asyncio.sleep(0.01)
        os.kill(engine_pid(server), signal.SIGKILL)
        error = await stream
        assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
        assert "signal 9" in str(error["message"])
        health = await http.get("/health")
        assert health.status_code == 503
        assert "started again" in health.text
        refused = await http.post("/v1/completions", json=requests[0].body(stream=False))
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        after = await asyncio.gather(*answers)
        warm = await whole(http, stored)
        assert await are_answered(http, of_memory, before[1::3])
    assert warm.equals(cold)
    assert warm.num_cached_tokens == 16 * NUM_STORED_BLOCKS, "an engine that has just begun"
    assert all(one.equals(other) for one, other in zip(after, before, strict=True))
    assert before[0].equals(expected)
    assert [one.fingerprints for one in after] == [one.fingerprints for one in before]
    assert metric(server.base_url, "lora_serve:engine_restarts_total") == 1
    wait_for(lambda: metric(server.base_url, "vllm:num_requests_running") == 0, "idle")


async def test_an_engine_that_hangs_costs_begun_streams_and_no_other_request(
    demo_paths: DemoPaths, start_server: StartServer, tmp_path: Path
) -> None:
    flags = (*server_flags(Server.CACHED), "--step-timeout", "2", "--drain-timeout", "1")
    long = Prompted("lora-serve-demo", random_ids("hang", 50), 6000)
    short = Prompted("lora-serve-demo", random_ids("wait", 50), 8)
    has_begun = asyncio.Event()
    with start_server(demo_paths.model, tmp_path / "log", *flags) as server:
        server.wait_until_healthy()
        async with client_for(server.base_url) as http:
            before = await whole(http, short)
            stream = asyncio.create_task(stream_until_error(http, long, has_begun))
            await has_begun.wait()
            os.kill(engine_pid(server), signal.SIGSTOP)
            answer = asyncio.create_task(whole(http, short))
            error = await asyncio.wait_for(stream, 20)
            assert error["code"] == 503
            assert "the engine hangs: no step and no reply for 2 s" in str(error["message"])
            after = await asyncio.wait_for(answer, 60)
        assert after.equals(before)
        assert metric(server.base_url, "lora_serve:engine_restarts_total") == 1


async def test_sigterm_lets_answers_end_and_refuses_new_ones(mortal_server: ServerProcess) -> None:
    server = mortal_server
    short = Prompted("lora-serve-demo", random_ids("short", 50), 30)
    long = replace(short, max_tokens=7000)
    async with client_for(server.base_url) as http, client_for(server.base_url) as late:
        await late.get("/version")  # it has a connection
        has_begun = asyncio.Event()
        stream = asyncio.create_task(stream_until_error(http, long, has_begun))
        await has_begun.wait()
        answer = asyncio.create_task(whole(http, short))
        while await num_active(http) < 2 and not answer.done():
            await asyncio.sleep(0.01)
        server.begin_to_stop()
        async with asyncio.timeout(10):  # signals take a moment
            while (await late.get("/health")).status_code == 200:
                await asyncio.sleep(0.01)
        assert (await answer).is_finished
        refused = await late.post("/v1/completions", json=short.body(stream=False))
        assert refused.status_code == 503
        assert "shutting down" in refused.text
        assert "shutting down" in str((await stream)["message"])  # after --drain-timeout
    assert await asyncio.to_thread(server.wait) == 0, server.last_log_lines()
