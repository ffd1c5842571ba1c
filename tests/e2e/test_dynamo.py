"""A worker behind NVIDIA Dynamo's own frontend, found by files; no etcd and no NATS."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

pytest.importorskip(
    "dynamo.frontend", reason="*** NO DYNAMO TESTED: pip install 'lora-serve[dynamo]' ***"
)

from lora_serve.demo.model import DemoPaths
from lora_serve.demo.scenarios import MODEL_NAME
from lora_serve.demo.server_process import ServerProcess, dying_with_parent, free_port
from tests.e2e.metrics import wait_for

pytestmark = pytest.mark.slow  # only where Dynamo is installed, which CI's machine has not

PATIENCE_SECONDS = 240
FILES = ("--discovery-backend", "file", "--request-plane", "tcp")
SMALL = "--enable-lora --cpu-threads 1 --max-model-len 512 --num-gpu-blocks-override 64".split()
QUESTION = [{"role": "user", "content": "What is your label?"}]


@pytest.fixture(scope="module")
def urls(demo_paths: DemoPaths, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The frontend's, and the worker's for what changes it."""
    directory, ports = tmp_path_factory.mktemp("dynamo"), (free_port(), small_free_port())
    worker = ["lora_serve.dynamo", str(demo_paths.model), "--served-model-name", MODEL_NAME]
    commands = (
        (["dynamo.frontend", "--http-port", str(ports[0])], {}),
        ([*worker, *SMALL], {"DYN_SYSTEM_PORT": str(ports[1])}),
    )
    processes = []
    for (module, *flags), variables in commands:
        with (directory / f"{module}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    dying_with_parent([sys.executable, "-m", module, *flags, *FILES]),
                    stdout=log, stderr=log,
                    env=os.environ | {"DYN_FILE_KV": str(directory / "kv"), **variables},
                )
            )  # fmt: skip
    found = [f"http://127.0.0.1:{port}" for port in ports]
    try:
        wait_for(lambda: is_up(processes, found[0]), "a worker", PATIENCE_SECONDS)
        yield found
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(PATIENCE_SECONDS)


def small_free_port() -> int:
    """A free port below 32,768: Dynamo reads its system port as a signed number of 16 bits."""
    for port in random.sample(range(20_000, 32_768), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def is_up(processes: list[subprocess.Popen[bytes]], url: str) -> bool:
    assert all(process.poll() is None for process in processes), "one has ended: see its log"
    return is_listed(url, MODEL_NAME)


def is_listed(url: str, name: str) -> bool:
    try:
        cards = httpx.get(f"{url}/v1/models", timeout=10).json()["data"]
    except httpx.TransportError:
        return False
    return name in [card["id"] for card in cards]


def answer(url: str, model: str) -> str:
    body = {"model": model, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
    return str(reply.json()["choices"][0]["message"]["content"])


def test_answers_are_those_of_a_server(urls: list[str], cold_server: ServerProcess) -> None:
    assert answer(urls[0], MODEL_NAME) == answer(cold_server.base_url, MODEL_NAME)


def test_an_adapter_is_loaded_replaced_and_unloaded_by_dynamos_calls(
    urls: list[str], demo_paths: DemoPaths
) -> None:
    frontend, worker = urls

    def update(call: str, **body: object) -> None:
        told = httpx.post(f"{worker}/engine/update/{call}", json=body, timeout=60).json()
        assert told["status"] == "success", told

    said = [answer(frontend, MODEL_NAME)]
    for path in (demo_paths.alpha, demo_paths.beta):
        update("load_lora", lora_name="tenant", source={"uri": path.as_uri()})
        wait_for(lambda: is_listed(frontend, "tenant"), "its name", PATIENCE_SECONDS)
        said.append(answer(frontend, "tenant"))
    assert len({*said}) == 3, said
    update("unload_lora", lora_name="tenant")
    wait_for(lambda: not is_listed(frontend, "tenant"), "its end", PATIENCE_SECONDS)
