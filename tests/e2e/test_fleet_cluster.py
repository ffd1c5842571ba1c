"""`serve run` with the file of deploy/ray: one replica behind an ingress and Ray Serve's proxy."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

from lora_serve.demo.model import DemoPaths
from lora_serve.demo.scenarios import MODEL_NAME
from lora_serve.demo.server_process import ServerProcess, dying_with_parent, free_port
from tests.e2e.metrics import wait_for
from tests.e2e.processes import pids_below
from tests.e2e.recording import Prompted, client_for, record, record_alone
from tests.e2e.test_trace import random_ids

pytest.importorskip("ray.serve", reason="NO CLUSTER TESTED: Ray Serve is missing (extra fleet)")

pytestmark = pytest.mark.slow  # a Ray with proxies takes minutes to start on two cores

FILE = Path(__file__).parents[2] / "deploy/ray/serve.yaml"
SERVE = "import sys; from ray.serve.scripts import cli; cli(sys.argv[1:])"
PATIENCE_SECONDS = 240
API_KEY, ADMIN_KEY = "key-of-4f1c", "admin-of-93ab"
KEY, ADMIN = ({"Authorization": f"Bearer {key}"} for key in (API_KEY, ADMIN_KEY))
CONTROLLER, PROXY = b"ray::ServeController", b"ray::ProxyActor"
SMALL = {
    "served_model_name": MODEL_NAME,
    "replicas": 1,
    "max_replicas": 1,
    "num_ingresses": 1,
    "cpu_threads": 1,
    "max_model_len": 4096,
}


@dataclass(frozen=True)
class Cluster:
    """pid: of the command that started it. logs: Ray's own, and what the command said."""

    url: str
    pid: int
    logs: Path


@pytest.fixture(scope="module")
def cluster(demo_paths: DemoPaths, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("cluster")
    short = Path(tempfile.mkdtemp(prefix="ray-"))  # sockets' paths are at most 107 bytes long
    config = yaml.safe_load(FILE.read_text())
    port = config["http_options"]["port"] = free_port()
    config["http_options"]["host"] = "127.0.0.1"
    config["applications"][0]["args"] |= SMALL | {"model": str(demo_paths.model)}
    (directory / "serve.yaml").write_text(yaml.safe_dump(config))
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "LORA_SERVE_API_KEY": API_KEY,
        "LORA_SERVE_ADMIN_API_KEY": ADMIN_KEY,
        "RAY_TMPDIR": str(short),
    }
    with (directory / "log").open("wb") as log:
        command = [sys.executable, "-c", SERVE, "run", str(directory / "serve.yaml")]
        process = subprocess.Popen(
            dying_with_parent(command), stdout=log, stderr=log, env=os.environ | variables
        )
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(lambda: is_ready(process, address, directory), "a start", PATIENCE_SECONDS)
        yield Cluster(address, process.pid, short)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_SECONDS)
        shutil.rmtree(short, ignore_errors=True)


@pytest.fixture
def url(cluster: Cluster) -> str:
    return cluster.url


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with client_for(cluster.url) as client:
        client.headers.update(ADMIN)
        yield client


def is_ready(process: subprocess.Popen[bytes], address: str, directory: Path) -> bool:
    assert process.poll() is None, (directory / "log").read_text()[-4000:]
    try:
        return httpx.get(f"{address}/health", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


async def test_answers_through_the_proxy_are_those_of_one_server(
    url: str, cold_server: ServerProcess
) -> None:
    requests = [Prompted(MODEL_NAME, random_ids(f"proxy {i}", 100), 16) for i in range(4)]
    expected = await record_alone(cold_server.base_url, requests)
    async with client_for(url) as http:
        http.headers.update(KEY)
        streamed = await asyncio.gather(*(record(http, request) for request in requests))
    assert all(one.equals(other) for one, other in zip(streamed, expected, strict=True))


async def test_keys_and_limits_are_the_servers(url: str) -> None:
    async with client_for(url) as http:
        body = Prompted(MODEL_NAME, (1, 2), 1).body(stream=False)
        assert (await http.post("/v1/completions", json=body)).status_code == 401
        assert (await http.post("/v1/completions", json=body, headers=KEY)).status_code == 200
        assert (await http.post("/reset_prefix_cache", headers=KEY)).status_code == 403
        assert (await http.post("/reset_prefix_cache", headers=ADMIN)).status_code == 200
        large = await http.post(
            "/v1/completions",
            content=b" " * (5 * 2**20),
            headers=KEY | {"Content-Type": "application/json"},
        )
        assert large.status_code == 413
        assert "--max-body-bytes" in large.json()["error"]["message"]


async def test_a_client_that_leaves_the_proxy_ends_its_request(url: str) -> None:
    body = Prompted(MODEL_NAME, random_ids("leaves", 40), 3900).body()
    async with client_for(url) as http:
        http.headers.update(ADMIN)
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    break
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                page = (await http.get("/metrics")).text
                lines = [line for line in page.splitlines() if "num_requests_running{" in line]
                if lines and all(line.endswith(" 0.0") for line in lines):
                    return
                await asyncio.sleep(0.2)


async def successor(cluster: Cluster, kind: bytes, victim: int) -> int:
    """The process that Ray has started in the place of one."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not (others := [p for p in pids_below(cluster.pid, kind) if p != victim]):
            await asyncio.sleep(0.2)
    return others[0]


async def test_kill_9_of_rays_controller_costs_no_request(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    requests = [Prompted(MODEL_NAME, random_ids(f"controller {i}", 60), 40) for i in range(4)]
    expected = [await record(http, request) for request in requests]
    (victim,) = pids_below(cluster.pid, CONTROLLER)
    is_over = asyncio.Event()
    num_answers = 0

    async def ask(index: int) -> None:
        nonlocal num_answers
        while not is_over.is_set():
            assert (await record(http, requests[index])).equals(expected[index])
            num_answers += 1

    async with asyncio.TaskGroup() as asking:
        for index in range(len(requests)):
            asking.create_task(ask(index))
        while num_answers < len(requests):
            await asyncio.sleep(0.1)
        os.kill(victim, signal.SIGKILL)
        await successor(cluster, CONTROLLER, victim)
        enough = num_answers + 2 * len(requests)
        while num_answers < enough:
            await asyncio.sleep(0.1)
        is_over.set()


async def test_kill_9_of_rays_proxy_costs_what_it_was_passing_on(
    cluster: Cluster, http: httpx.AsyncClient
) -> None:
    request = Prompted(MODEL_NAME, random_ids("proxy", 60), 40)
    expected = await record(http, request)
    body = Prompted(MODEL_NAME, random_ids("proxy", 40), 3900).body()
    (victim,) = pids_below(cluster.pid, PROXY)
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.aiter_lines()
        await anext(lines)
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(httpx.TransportError):
            async for _ in lines:
                pass
    await successor(cluster, PROXY, victim)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            try:
                if (await http.get("/health")).status_code == 200:
                    break
            except httpx.TransportError:
                await asyncio.sleep(0.2)
    assert (await record(http, request)).equals(expected)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while "num_requests_running{" not in (page := (await http.get("/metrics")).text) or any(
            "num_requests_running{" in line and not line.endswith(" 0.0")
            for line in page.splitlines()
        ):
            await asyncio.sleep(0.2)  # the request whose client is gone ends


async def test_keys_are_in_no_file_of_rays(cluster: Cluster) -> None:
    files = [path for path in cluster.logs.rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        text = path.read_bytes()
        assert API_KEY.encode() not in text, path
        assert ADMIN_KEY.encode() not in text, path
