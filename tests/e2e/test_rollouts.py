"""A step of training as TRL drives it, over HTTP against a real engine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from lora_serve.demo.model import DemoPaths
from lora_serve.demo.server_process import ServerProcess

PROMPT = list(range(20, 60))
ROLL_OUT = {
    "prompt": PROMPT,
    "max_tokens": 200,
    "temperature": 1.0,
    "logprobs": 0,
    "seed": 7,
    "ignore_eos": True,
    "return_token_ids": True,
}
SAMPLING = ("max_tokens", "temperature", "logprobs", "seed", "ignore_eos")


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.base_url, timeout=60) as http:
        yield http
        http.post("/resume").raise_for_status()


def answered(response: httpx.Response) -> dict:
    assert response.status_code == 200, response.text
    return response.json()


def roll_out(http: httpx.Client, model: str | None, **fields: object) -> dict:
    return answered(http.post("/v1/completions", json={**ROLL_OUT, "model": model, **fields}))


def given(answer: dict) -> tuple[list[int], list[float], str]:
    """Everything that must be equal to the bit, and the version that gave it."""
    (choice,) = answer["choices"]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"], answer["system_fingerprint"]


def load(http: httpx.Client, name: str, path: object, *, in_place: bool = False) -> None:
    body = {"lora_name": name, "lora_path": str(path), "load_inplace": in_place}
    response = http.post("/v1/load_lora_adapter", json=body)
    assert response.status_code == 200, response.text


class RunningRollOut:
    """A roll-out of 600 tokens that has given its first when this is made; `whole` waits for all.

    It is streamed: a roll-out takes less time than a page of /metrics is kept for, so that whether
    one is running is not told there in time.
    """

    def __init__(self, http: httpx.Client, model: str | None, **fields: object) -> None:
        self._body = {**ROLL_OUT, "max_tokens": 600, "stream": True, "model": model, **fields}
        self._http = http
        self._events: list[dict] = []
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self._has_begun.wait(60)

    def _read(self) -> None:
        with self._http.stream("POST", "/v1/completions", json=self._body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    self._events.append(json.loads(line.removeprefix("data: ")))
                    self._has_begun.set()

    def whole(self) -> dict:
        """What the same request is answered when it is not streamed, as far as `given` reads it."""
        self._thread.join(60)
        (fingerprint,) = {event["system_fingerprint"] for event in self._events}
        choices = [choice for event in self._events for choice in event["choices"]]
        told = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        choice = {
            "token_ids": [x for choice in choices for x in choice["token_ids"] or ()],
            "logprobs": {"token_logprobs": [x for part in told for x in part["token_logprobs"]]},
            "finish_reason": choices[-1]["finish_reason"],
        }
        return {"choices": [choice], "system_fingerprint": fingerprint}


def test_a_step_of_training_as_trl_takes_it(http: httpx.Client, demo_paths: DemoPaths) -> None:
    assert http.get("/health").status_code == 200
    info = answered(http.get("/server_info?config_format=json"))["vllm_config"]
    assert info["lora_config"]["max_lora_rank"] >= 1
    assert info["parallel_config"]["data_parallel_size"] == 1
    assert answered(http.get("/get_world_size"))["world_size"] == 1
    load(http, "trl-policy-v1", demo_paths.alpha)
    alone = given(roll_out(http, "trl-policy-v1"))

    running = RunningRollOut(http, "trl-policy-v1")
    assert answered(http.post("/pause?mode=keep")) == {"status": "paused"}
    load(http, "trl-policy-v2", demo_paths.beta)
    held: list[dict] = []
    waiting = threading.Thread(target=lambda: held.append(roll_out(http, "trl-policy-v2")))
    waiting.start()
    time.sleep(0.2)
    assert http.get("/health").status_code == 200
    assert not held
    assert answered(http.get("/is_paused")) == {"is_paused": True}
    assert answered(http.post("/resume")) == {"status": "resumed"}
    token_ids, logprobs, version = given(running.whole())
    waiting.join(60)
    assert http.post("/v1/unload_lora_adapter", json={"lora_name": "trl-policy-v1"}).is_success

    assert (token_ids[:200], logprobs[:200], version) == alone
    again = given(roll_out(http, "trl-policy-v2"))
    assert given(held[0]) == again
    assert again[2] != version
    asked = {
        "model": "trl-policy-v2",
        "token_ids": PROMPT,
        "sampling_params": {
            k: v for k, v in ROLL_OUT.items() if k not in ("prompt", "return_token_ids")
        },
    }
    generated = answered(http.post("/inference/v1/generate", json=asked))
    (choice,) = generated["choices"]
    told = [position["logprob"] for position in choice["logprobs"]["content"]]
    assert (choice["token_ids"], told, generated["system_fingerprint"]) == again


def test_a_kept_request_ends_with_the_version_that_was_replaced(
    http: httpx.Client, demo_paths: DemoPaths
) -> None:
    load(http, "replaced", demo_paths.alpha)
    alone = given(roll_out(http, "replaced", max_tokens=600))
    running = RunningRollOut(http, "replaced", cache_salt="2")
    answered(http.post("/pause?mode=keep"))
    load(http, "replaced", demo_paths.beta, in_place=True)
    answered(http.post("/resume"))
    assert given(running.whole()) == alone
    assert given(roll_out(http, "replaced"))[2] != alone[2]


def test_requests_that_are_aborted_say_so_and_give_what_they_had(http: httpx.Client) -> None:
    whole = roll_out(http, None, max_tokens=600)["choices"][0]["token_ids"]
    running = RunningRollOut(http, None, request_id="mine")
    body = {"request_ids": ["mine"]}
    assert answered(http.post("/inference/v1/abort_requests", json=body))["aborted"] == 1
    (choice,) = running.whole()["choices"]
    assert choice["finish_reason"] == "abort"
    assert choice["token_ids"] == whole[: len(choice["token_ids"])]
