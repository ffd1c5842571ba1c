"""Clients that vanish, politely or not, leave nothing behind in the server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from lora_serve.demo.server_process import ServerProcess
from tests.e2e.metrics import metric, wait_for
from tests.e2e.recording import Prompted, client_for, record_alone, record_until
from tests.e2e.test_trace import random_ids

CLIENT = """
import sys
import httpx

body = {
    "model": "lora-serve-demo", "prompt": list(range(100, 500)), "max_tokens": 7000,
    "ignore_eos": True, "stream": True, "temperature": 0,
}
with httpx.stream("POST", sys.argv[1] + "/v1/completions", json=body, timeout=60) as response:
    for line in response.iter_lines():
        print("token", flush=True)
"""


def test_a_client_killed_in_mid_stream_frees_its_place_and_its_blocks(
    server: ServerProcess,
) -> None:
    command = [sys.executable, "-c", CLIENT, server.base_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == b"token\n"
        assert metric(server.base_url, "vllm:num_requests_running") == 1
        assert metric(server.base_url, "vllm:kv_cache_usage_perc") > 0
        os.kill(client.pid, signal.SIGKILL)
    wait_for(lambda: is_idle(server), "the request is aborted and its blocks are free", seconds=10)


async def test_many_clients_that_hang_up_leave_the_server_idle_and_exact(
    server: ServerProcess, cold_server: ServerProcess
) -> None:
    requests = [
        Prompted("lora-serve-demo", random_ids(f"hang up {i}", 300), 2000) for i in range(12)
    ]
    async with client_for(server.base_url) as http:
        for i, request in enumerate(requests):
            await record_until(http, request, seconds=0.02 * i)
    wait_for(lambda: is_idle(server), "all requests are aborted")
    short = [Prompted(r.model, r.token_ids, 8) for r in requests[:4]]
    for recorded, expected in zip(
        await record_alone(server.base_url, short),
        await record_alone(cold_server.base_url, short),
        strict=True,
    ):
        assert recorded.equals(expected)


def is_idle(server: ServerProcess) -> bool:
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return all(metric(server.base_url, f"vllm:{gauge}") == 0 for gauge in gauges)
