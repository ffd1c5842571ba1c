"""A prompt is computed by one server and continued by another, as llm-d's sidecar asks for it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from lora_serve.demo.model import DemoPaths
from lora_serve.demo.scenarios import MODEL_NAME
from lora_serve.demo.server_process import ServerProcess
from tests.e2e.conftest import StartServer, ready

BLOCK_SIZE = 16
PROMPT = [3 + (i * 11) % 700 for i in range(200)]
NUM_FINDABLE = (len(PROMPT) - 1) // BLOCK_SIZE * BLOCK_SIZE
PREFILL = {  # what the sidecar writes into a body for the server that is to prefill
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}

Pair = tuple[ServerProcess, ServerProcess]


@pytest.fixture(scope="module")
def pair(
    demo_paths: DemoPaths, start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    """A producer and a consumer over one directory."""
    directory = tmp_path_factory.mktemp("prefill-decode")
    with ExitStack() as stack:
        servers = []
        for role in ("kv_producer", "kv_consumer"):
            transfer = {
                "kv_connector": "TieredConnector",
                "kv_role": role,
                "engine_id": role,
                "kv_connector_extra_config": {"kv_disk_path": str(directory / "kv")},
                "kv_load_deadline_ms": 60_000,
                "kv_save_deadline_ms": 60_000,
            }
            flags = (
                *("--served-model-name", MODEL_NAME, "--enable-lora", "--cpu-threads", "1"),
                *("--lora-modules", f"alpha={demo_paths.alpha}"),
                *("--kv-transfer-config", json.dumps(transfer)),
            )
            log = directory / f"{role}.log"
            servers.append(stack.enter_context(start_server(demo_paths.model, log, *flags)))
        yield ready(servers[0]), ready(servers[1])


def post(server: ServerProcess, route: str, body: dict[str, object]) -> httpx.Response:
    return httpx.post(f"{server.base_url}{route}", json=body, timeout=300)


def completion(**body: object) -> dict[str, object]:
    return {
        "prompt": PROMPT,
        "temperature": 0.8,
        "seed": 7,
        "logprobs": 1,
        "max_tokens": 12,
        **body,
    }


@pytest.mark.parametrize("model", [MODEL_NAME, "alpha"])
def test_the_decoder_finds_what_the_prefiller_has_answered_for_and_answers_the_same_bits(
    pair: Pair, model: str
) -> None:
    producer, consumer = pair
    cold = post(producer, "/v1/completions", completion(model=model, cache_salt="cold")).json()
    asked = completion(model=model, max_tokens=1, kv_transfer_params=PREFILL)
    prefilled = post(producer, "/v1/completions", asked).raise_for_status().json()
    params = prefilled["kv_transfer_params"]
    assert params["remote_num_tokens"] == NUM_FINDABLE
    assert (params["do_remote_prefill"], params["do_remote_decode"]) == (True, False)
    assert params["remote_request_id"] == prefilled["id"]
    body = completion(model=model, kv_transfer_params=params)
    decoded = post(consumer, "/v1/completions", body).raise_for_status().json()
    assert (
        decoded["usage"]["prompt_tokens_details"]["cached_tokens_by_tier"]["disk"] == NUM_FINDABLE
    )
    assert decoded["kv_transfer_params"] is None
    for name in ("text", "logprobs", "finish_reason"):
        assert decoded["choices"][0][name] == cold["choices"][0][name]
    assert decoded["system_fingerprint"] == cold["system_fingerprint"]


def test_a_decoder_computes_what_nobody_has_prefilled(pair: Pair) -> None:
    producer, consumer = pair
    body = completion(model=MODEL_NAME, prompt=[5, *PROMPT])
    params = {"do_remote_prefill": True, "remote_host": "gone", "remote_block_ids": [[1, 2]]}
    decoded = post(consumer, "/v1/completions", body | {"kv_transfer_params": params}).json()
    assert decoded["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    alone = post(producer, "/v1/completions", body).json()
    assert decoded["choices"][0]["logprobs"] == alone["choices"][0]["logprobs"]


def test_chats_and_token_ids_are_handed_over_too_and_a_consumer_hands_nothing_over(
    pair: Pair,
) -> None:
    producer, consumer = pair
    chat = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": "to be continued " * 12}],
        "max_completion_tokens": 1,
        "kv_transfer_params": PREFILL,
    }
    by_ids = {
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": 1},
        "kv_transfer_params": PREFILL,
    }
    response = {
        "model": MODEL_NAME,
        "input": "to be continued " * 12,
        "max_output_tokens": 1,
        "kv_transfer_params": PREFILL,
    }
    for route, body in (
        ("/v1/chat/completions", chat),
        ("/v1/responses", response),
        ("/inference/v1/generate", by_ids),
    ):
        answer = post(producer, route, body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["kv_transfer_params"]["remote_num_tokens"] >= BLOCK_SIZE
        refused = post(consumer, route, body)
        assert refused.status_code == 400
        assert "stores no KV" in refused.json()["error"]["message"]
