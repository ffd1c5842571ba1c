"""`serve run` with the file of deploy/ray: one replica behind an ingress and Ray Serve's proxy."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from lora_serve.demo.model import DemoPaths
from lora_serve.demo.scenarios import MODEL_NAME
from lora_serve.demo.server_process import ServerProcess, dying_with_parent, free_port
from tests.e2e.metrics import wait_for
from tests.e2e.recording import Prompted, client_for, record, record_alone
from tests.e2e.test_trace import random_ids

pytest.importorskip("ray.serve", reason="NO CLUSTER TESTED: Ray Serve is missing (extra fleet)")

pytestmark = pytest.mark.slow  # a Ray with proxies takes minutes to start on two cores

FILE = Path(__file__).parents[2] / "deploy/ray/serve.yaml"
SERVE = "import sys; from ray.serve.scripts import cli; cli(sys.argv[1:])"
PATIENCE_SECONDS = 240
KEY, ADMIN = {"Authorization": "Bearer key"}, {"Authorization": "Bearer admin"}
SMALL = {
    "served_model_name": MODEL_NAME,
    "replicas": 1,
    "max_replicas": 1,
    "num_ingresses": 1,
    "cpu_threads": 1,
    "max_model_len": 4096,
}


@pytest.fixture(scope="module")
def url(demo_paths: DemoPaths, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("cluster")
    config = yaml.safe_load(FILE.read_text())
    port = config["http_options"]["port"] = free_port()
    config["http_options"]["host"] = "127.0.0.1"
    config["applications"][0]["args"] |= SMALL | {"model": str(demo_paths.model)}
    (directory / "serve.yaml").write_text(yaml.safe_dump(config))
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "LORA_SERVE_API_KEY": "key",
        "LORA_SERVE_ADMIN_API_KEY": "admin",
    }
    with (directory / "log").open("wb") as log:
        command = [sys.executable, "-c", SERVE, "run", str(directory / "serve.yaml")]
        process = subprocess.Popen(
            dying_with_parent(command), stdout=log, stderr=log, env=os.environ | variables
        )
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(lambda: is_ready(process, address, directory), "a start", PATIENCE_SECONDS)
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_SECONDS)


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
