"""What gateways and controllers ask of a server, call by call, as their sources have it.

Each part names the source; the requests are those that it sends, and what is asserted is what it
needs of the answer.
"""

from __future__ import annotations

import json
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import trustme
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from lora_serve.demo.model import DemoPaths
from lora_serve.demo.scenarios import MODEL_NAME
from lora_serve.demo.server_process import ServerProcess, free_port

DOCKER = Path(__file__).parents[2] / "docker"


PATIENCE_SECONDS = 60


def eventually(is_so: Callable[[], bool], what: str) -> None:
    """Wait for it. A new page of metrics may take a second."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < until, f"not within {PATIENCE_SECONDS} s: {what}"
        time.sleep(0.1)


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.base_url, timeout=300) as client:
        yield client


@pytest.fixture
def names(request: pytest.FixtureRequest, http: httpx.Client) -> Iterator[list[str]]:
    """Names for a test's adapters, unloaded at its end if they are there."""
    test = request.node.name.partition("[")[0].replace("_", "-")[:60]
    names = [f"{test}-{i}" for i in range(3)]
    yield names
    for name in names:
        http.post("/v1/unload_lora_adapter", json={"lora_name": name})


def scraped(http: httpx.Client) -> list[Sample]:
    page = http.get("/metrics").raise_for_status().text
    return [s for family in text_string_to_metric_families(page) for s in family.samples]


# llm-d's router and the Gateway API inference extension: pkg/epp/framework/plugins/datalayer/
# extractor/metrics/{factories,extractor,loraspec}.go, …/datalayer/source/models,
# …/requestcontrol/dataproducer/tokenizer/vllm_http.go


@dataclass
class Endpoint:
    """What the endpoint picker makes of a scrape."""

    waiting: float = -1
    running: float = -1
    kv_usage: float = -1
    max_active: int = -1
    block_size: int = -1
    num_blocks: int = -1
    active: set[str] = field(default_factory=set)
    queued: set[str] = field(default_factory=set)


def picked(samples: list[Sample]) -> Endpoint:
    def latest(name: str) -> Sample:
        return max((s for s in samples if s.name == name), key=lambda s: s.value)

    def listed(text: str) -> set[str]:
        return {name.strip() for name in text.split(",") if name.strip()}

    lora = latest("vllm:lora_requests_info").labels
    cache = latest("vllm:cache_config_info").labels
    return Endpoint(
        waiting=latest("vllm:num_requests_waiting").value,
        running=latest("vllm:num_requests_running").value,
        kv_usage=latest("vllm:kv_cache_usage_perc").value,
        max_active=int(lora["max_lora"]),
        block_size=int(cache["block_size"]),
        num_blocks=int(cache["num_gpu_blocks"]),
        active=listed(lora["running_lora_adapters"]),
        queued=listed(lora["waiting_lora_adapters"]),
    )


def test_an_endpoint_picker_sees_load_and_the_adapters_that_are_on_the_device(
    http: httpx.Client, names: list[str], demo_paths: DemoPaths
) -> None:
    body = {"lora_name": names[0], "lora_path": str(demo_paths.alpha)}
    http.post("/v1/load_lora_adapter", json=body).raise_for_status()
    through_envoy = {
        "x-gateway-destination-endpoint": "10.0.0.7:8000",
        "x-gateway-inference-fairness-id": "tenant-a",
        "x-gateway-inference-objective": "chat",
        "x-request-id": "4f1c",
    }
    asked = {"model": names[0], "prompt": "Hello", "max_tokens": 2}
    answer = http.post("/v1/completions", json=asked, headers=through_envoy).raise_for_status()
    assert answer.json()["model"] == names[0]
    eventually(
        lambda: names[0] in picked(scraped(http)).active, "the idle adapter is on the device"
    )
    seen = picked(scraped(http))
    assert min(seen.waiting, seen.running, seen.kv_usage) >= 0
    assert seen.kv_usage <= 1
    assert seen.block_size == 16
    assert seen.num_blocks > 0
    assert len(seen.active) <= seen.max_active
    http.post("/v1/unload_lora_adapter", json={"lora_name": names[0]}).raise_for_status()
    eventually(lambda: names[0] not in picked(scraped(http)).active, "an unloaded one is not")


def test_an_endpoint_picker_gets_the_tokens_that_the_answer_will_be_computed_from(
    http: httpx.Client,
) -> None:
    payload = {"model": MODEL_NAME, "prompt": "Hello there", "max_tokens": 1, "stream": True}
    (rendered,) = http.post("/v1/completions/render", json=payload).raise_for_status().json()
    asked = {**payload, "stream": False, "return_token_ids": True}
    answered = http.post("/v1/completions", json=asked).raise_for_status().json()
    assert rendered["token_ids"] == answered["choices"][0]["prompt_token_ids"]
    chat = {
        "model": MODEL_NAME,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "What is your label?"}]},
            {"role": "assistant", "content": "None."},
            {"role": "user", "content": "Sure?"},
        ],
        "add_generation_prompt": True,
    }
    rendered = http.post("/v1/chat/completions/render", json=chat).raise_for_status().json()
    asked = {**chat, "max_tokens": 1, "return_token_ids": True}
    answered = http.post("/v1/chat/completions", json=asked).raise_for_status().json()
    assert rendered["token_ids"] == answered["prompt_token_ids"]
    assert rendered.get("features") is None


# production-stack: the operator's loraadapter_controller.go; of vllm_router, service_discovery.py
# and stats/engine_stats.py


def operator_call(http: httpx.Client, method: str, path: str, payload: object = None) -> bytes:
    """One call of the operator: it raises unless the answer is one that it takes for success."""
    content = None if payload is None else json.dumps(payload)
    headers = {"Content-Type": "application/json"}
    reply = http.request(method, path, content=content, headers=headers)
    if reply.status_code == 400:
        error = json.loads(reply.content)
        loaded = "has already been loaded" in error.get("message", "")
        if error.get("type") == "InvalidUserInput" and loaded:
            return reply.content
    assert reply.status_code == 200, reply.text
    return reply.content


def registrations(http: httpx.Client, name: str) -> list[Mapping[str, object]]:
    """What the operator writes into the status of a LoraAdapter."""
    listed = json.loads(operator_call(http, "GET", "/v1/models"))["data"]
    for card in listed:
        assert isinstance(card["created"], int)
    return [card for card in listed if card.get("parent") is not None and card["id"] == name]


def test_production_stacks_operator_loads_finds_and_unloads_an_adapter(
    http: httpx.Client, names: list[str], demo_paths: DemoPaths
) -> None:
    name, path = names[0], str(demo_paths.alpha)
    assert registrations(http, name) == []
    wanted = {"lora_name": name, "lora_path": path}
    operator_call(http, "POST", "/v1/load_lora_adapter", wanted)
    (card,) = registrations(http, name)
    assert (card["root"], card["parent"]) == (path, MODEL_NAME)
    operator_call(http, "POST", "/v1/load_lora_adapter", wanted)  # seen too late that it is there
    wrong = {"lora_name": names[1], "lora_path": "/none"}
    with pytest.raises(AssertionError, match="failed"):
        operator_call(http, "POST", "/v1/load_lora_adapter", wrong)
    operator_call(http, "POST", "/v1/unload_lora_adapter", {"lora_name": name})
    assert registrations(http, name) == []


def test_production_stacks_router_reads_models_and_load(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    cards = http.get("/v1/models").raise_for_status().json()["data"]
    assert MODEL_NAME in [card["id"] for card in cards if card["parent"] is None]
    seen = {sample.name: sample.value for sample in scraped(http)}
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "gpu_prefix_cache_hits_total",
        "gpu_prefix_cache_queries_total",
        "gpu_cache_usage_perc",
    ):
        assert seen[f"vllm:{name}"] >= 0


# AIBrix: pkg/controller/modeladapter/lora_client.go, pkg/metrics/metrics.go,
# python/aibrix/aibrix/openapi/engine/vllm.py


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_aibrix_loads_an_adapter_that_is_not_listed_and_unloads_it(
    http: httpx.Client, names: list[str], demo_paths: DemoPaths, engine: str
) -> None:
    prefix = "/v1" if engine == "vllm" else ""
    listed = {card["id"] for card in http.get("/v1/models").raise_for_status().json()["data"]}
    assert names[0] not in listed
    wanted = {"lora_name": names[0], "lora_path": str(demo_paths.beta)}
    assert http.post(f"{prefix}/load_lora_adapter", json=wanted).status_code in (200, 201)
    listed = {card["id"] for card in http.get("/v1/models").raise_for_status().json()["data"]}
    assert names[0] in listed
    unwanted = {"lora_name": names[0], "lora_int_id": None}  # as its runtime sends it
    assert http.post(f"{prefix}/unload_lora_adapter", json=unwanted).status_code in (200, 201)


def test_aibrix_finds_the_metrics_of_its_routing_and_autoscaling(http: httpx.Client) -> None:
    samples = scraped(http)
    of_pods = ("num_requests_running", "num_requests_waiting", "gpu_cache_usage_perc")
    counters = (
        *("prompt_tokens_total", "generation_tokens_total", "request_success_total"),
        *("prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total"),
        *("external_prefix_cache_queries_total", "external_prefix_cache_hits_total"),
    )
    histograms = (
        *("time_to_first_token_seconds", "time_per_output_token_seconds"),
        *("inter_token_latency_seconds", "e2e_request_latency_seconds"),
        *("request_queue_time_seconds", "request_inference_time_seconds"),
        *("request_prefill_time_seconds", "request_decode_time_seconds"),
        *("request_prompt_tokens", "request_generation_tokens"),
    )
    names = (*of_pods, "kv_cache_usage_perc", *counters)
    for name in (*names, *(f"{h}_{part}" for h in histograms for part in ("sum", "count"))):
        found = [sample for sample in samples if sample.name == f"vllm:{name}"]
        assert found, name
        assert all(sample.labels["model_name"] == MODEL_NAME for sample in found)


# KServe: config/llmisvcconfig/config-llm-template.yaml,
# pkg/controller/v1alpha2/llmisvc/workload_lora.go


@dataclass
class Pod:
    """A container of KServe's: the image's commands on the path, and what it mounts."""

    url: str
    client: httpx.Client
    process: subprocess.Popen[bytes]


@pytest.fixture
def image_path(tmp_path: Path) -> str:
    """PATH as it is in the image: `vllm` and `lora-serve` lie on it."""
    program = tmp_path / "bin" / "lora-serve"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m lora_serve.cli.main "$@"\n')
    program.chmod(0o755)
    return f"{DOCKER}:{program.parent}:{os.environ['PATH']}"


@pytest.fixture
def kserve_pod(
    model_path: Path, adapter_paths: list[Path], tmp_path: Path, image_path: str
) -> Iterator[Pod]:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(tmp_path / "tls.key")
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(tmp_path / "tls.crt", append=True)
    port = free_port()
    modules = " ".join(
        "'" + json.dumps({"name": name, "path": str(adapter_paths[0])}) + "'"
        for name in ("a", "publishers/llm/models/a")
    )
    command = (
        f"exec vllm serve {model_path} --served-model-name m publishers/llm/models/m "
        f"--port {port} --disable-access-log-for-endpoints /health,/metrics,/ping "
        "--shutdown-timeout 45 --tensor-parallel-size 1 --enable-ssl-refresh "
        f"--ssl-certfile {tmp_path}/tls.crt --ssl-keyfile {tmp_path}/tls.key "
        "${VLLM_ADDITIONAL_ARGS} $@"
    )
    flags = f"--enable-lora --max-lora-rank=64 --max-loras=2 --lora-modules {modules}"
    environment = {
        **os.environ,
        "PATH": image_path,
        "VLLM_ADDITIONAL_ARGS": "--kv-cache-memory-bytes 8MiB",
    }
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    with (
        (tmp_path / "log").open("wb") as log,
        subprocess.Popen(
            ["/bin/bash", "-c", f'eval "{command}"', "--", flags],
            env=environment, stdout=log, stderr=log,
        ) as process,
        httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=trusted, timeout=60) as client,
    ):  # fmt: skip
        try:
            yield Pod(f"https://127.0.0.1:{port}", client, process)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def is_healthy(pod: Pod) -> bool:
    assert pod.process.poll() is None, "the container has ended"
    try:
        return pod.client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


def test_kserves_command_starts_the_server_in_the_image(kserve_pod: Pod) -> None:
    eventually(lambda: is_healthy(kserve_pod), "the probes pass")
    cards = kserve_pod.client.get("/v1/models").raise_for_status().json()["data"]
    names = {"m", "publishers/llm/models/m", "a", "publishers/llm/models/a"}
    assert {card["id"] for card in cards} == names
    for name in sorted(names):
        body = {"model": name, "prompt": "hi", "max_tokens": 2, "of_a_gateway": 1}
        assert kserve_pod.client.post("/v1/completions", json=body).json()["model"] == name


def test_the_images_vllm_tells_a_version(image_path: str) -> None:
    asked = ["bash", "-c", "vllm --version | tail -1 | awk '{print $NF}'"]
    environment = {**os.environ, "PATH": image_path}
    told = subprocess.run(
        asked, capture_output=True, text=True, timeout=60, env=environment, check=True
    ).stdout
    assert told.split()[-1].partition(".")[0].isdigit()
