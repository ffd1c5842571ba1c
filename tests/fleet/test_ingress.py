from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

from lora_serve.config import ServerConfig
from lora_serve.fleet.ingress import MAX_ATTEMPTS, ingress_app
from lora_serve.server.operation import Operation
from lora_serve.server.routes import OPERATIONS
from tests.fakes.engine import MODEL, FakeEngine, write_adapter
from tests.fakes.fleet import LocalFleet
from tests.server.clients import Json, client_for, error_of, events, eventually

KEYS = ServerConfig(api_key=("key",), admin_api_key=("admin",))
ADMIN = {"Authorization": "Bearer admin"}
ID = {"X-Request-Id": "chosen"}
PROMPT: Json = {"model": MODEL, "prompt": "Count to three", "max_tokens": 8, "seed": 1}


class Party:
    """A fleet of two, its engines, and a client of it."""

    def __init__(
        self, server: ServerConfig, policy: str = "affinity", has_catalog: bool = True
    ) -> None:
        self.engines = [FakeEngine(), FakeEngine()]
        self.fleet = LocalFleet(self.engines, server, policy)
        app = ingress_app(self.fleet, self.engines[0].config, server, has_catalog=has_catalog)
        transport = httpx.ASGITransport(app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost")


@pytest.fixture
async def party() -> AsyncIterator[Party]:
    party = Party(ServerConfig())
    async with party.client:
        yield party


def same_form(response: httpx.Response) -> tuple[object, ...]:
    """What must be equal of two answers: all but the moment and where it was measured."""
    body = re.sub(rb'"time":[0-9.]+', b'"time":0', response.content)
    body = re.sub(rb'"(created|created_at|completed_at)":\d+', rb'"\1":0', body)
    headers = dict(response.headers)
    for name in ("x-request-id", "request-id") if "chosen" not in headers.values() else ():
        headers.pop(name)
    headers.pop("content-length", None)
    return response.status_code, headers, re.sub(rb"[0-9a-f]{32}", b"ID", body)


def asked_of(operation: Operation) -> tuple[str, str, Json | None]:
    path = re.sub(r"\{\w+\}", "none-of-this-name", operation.path)
    return operation.method.upper(), path, dict(operation.example) if operation.body else None


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer key"}, ADMIN, {"x-api-key": ""}])
async def test_every_route_answers_as_one_server_does(headers: dict[str, str]) -> None:
    party = Party(KEYS)
    async with client_for(FakeEngine(), KEYS) as single, party.client as client:
        for operation in OPERATIONS:
            if operation.path in ("/metrics", "/pause"):  # of each replica; holds what follows
                continue
            method, path, body = asked_of(operation)
            both = [
                await each.request(method, path, json=body, headers=headers | ID)
                for each in (single, client)
            ]
            assert same_form(both[0]) == same_form(both[1]), (method, path)


BAD: dict[str, Callable[[httpx.AsyncClient], object]] = {
    "no JSON": lambda c: c.post("/v1/completions", content=b"{", headers=JSON_TYPE),
    "another type": lambda c: c.post("/v1/completions", content=b"{}"),
    "no body": lambda c: c.post("/v1/chat/completions"),
    "an unknown model": lambda c: c.post("/v1/completions", json=PROMPT | {"model": "nobody"}),
    "a wrong field": lambda c: c.post("/v1/completions", json=PROMPT | {"prompt": {"a": [1]}}),
    "no such route": lambda c: c.get("/v1/nothing"),
    "no such method": lambda c: c.put("/v1/models"),
    "Anthropic's error": lambda c: c.post("/v1/messages", json={"model": MODEL}),
    "too large": lambda c: c.post("/v1/completions", content=b" " * 2**17, headers=JSON_TYPE),
    "a foreign host": lambda c: c.get("/v1/models", headers={"Host": "evil.example"}),
    "an unfit id": lambda c: c.get("/v1/models", headers={"X-Request-Id": "x" * 300}),
    "HEAD": lambda c: c.head("/v1/models"),
    "OPTIONS": lambda c: c.options("/v1/models", headers={"Origin": "http://localhost"}),
    "deep": lambda c: c.post("/v1/completions", content=b"[" * 9000, headers=JSON_TYPE),
}
JSON_TYPE = {"Content-Type": "application/json"}


@pytest.mark.parametrize("ask", BAD.values(), ids=[*BAD])
async def test_what_is_wrong_is_told_as_one_server_tells_it(
    ask: Callable[[httpx.AsyncClient], object],
) -> None:
    server = ServerConfig(max_body_bytes=2**16)
    async with client_for(FakeEngine(), server) as single, Party(server).client as client:
        both = [await ask(each) for each in (single, client)]  # type: ignore[misc]
    assert same_form(both[0]) == same_form(both[1])


async def test_a_body_without_a_known_key_is_not_read() -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with Party(KEYS).client as client:
        async with asyncio.timeout(60):
            answer = await client.post("/v1/completions", content=endless(), headers=JSON_TYPE)
    error_of(answer, 401)


async def test_a_slow_body_is_refused_at_the_door() -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with Party(ServerConfig(request_body_timeout=0.05)).client as client:
        answer = await client.post("/v1/messages", content=endless(), headers=JSON_TYPE)
    assert "--request-body-timeout" in str(error_of(answer, 408)["message"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("lost_after", [0, 1, 2])
async def test_a_request_of_which_nothing_was_sent_is_answered_by_another_replica(
    party: Party, stream: bool, lost_after: int
) -> None:
    whole = await party.client.post("/v1/completions", json=PROMPT | {"stream": stream}, headers=ID)
    party.fleet.lost_after[party.fleet.asked[0]] = lost_after
    again = await party.client.post("/v1/completions", json=PROMPT | {"stream": stream}, headers=ID)
    assert same_form(whole) == same_form(again)
    assert party.fleet.asked[1:] == [party.fleet.asked[0], *{"r0", "r1"} - {party.fleet.asked[0]}]


async def test_a_replica_that_is_lost_behind_its_whole_answer_costs_nothing(party: Party) -> None:
    """An error would close the connection, on which the client may have sent its next request."""
    whole = await party.client.post("/v1/completions", json=PROMPT, headers=ID)
    party.fleet.lost_at_end = {"r0", "r1"}
    again = await party.client.post("/v1/completions", json=PROMPT, headers=ID)
    assert same_form(whole) == same_form(again)
    assert len(party.fleet.asked) == 2


async def test_a_stream_that_has_begun_ends_with_an_error(party: Party) -> None:
    party.fleet.lost_after = {"r0": 4, "r1": 4}
    body = PROMPT | {"stream": True}
    streamed = await party.client.post("/v1/completions", json=body)
    streams = streamed.text.split("\n\n")
    assert streams[-2:] == ["data: [DONE]", ""]
    error = json.loads(streams[-3].removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
    assert len(party.fleet.asked) == 1
    chat = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": "Count"}]}
    answer = await party.client.post("/v1/messages", json=chat | {"stream": True})
    last = answer.text.split("\n\n")[-2]
    assert last.startswith("event: error\n")
    assert json.loads(last.partition("data: ")[2])["error"]["type"] == "overloaded_error"


async def test_attempts_are_bounded_and_the_last_word_is_an_error(party: Party) -> None:
    party.fleet.lost_after = {"r0": 0, "r1": 0}
    answer = await party.client.post("/v1/completions", json=PROMPT)
    assert "lost" in str(error_of(answer, 503)["message"])
    assert answer.headers["retry-after"] == "1"
    assert len(party.fleet.asked) == MAX_ATTEMPTS


async def test_a_change_of_adapters_is_never_done_twice(party: Party, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", "weights")
    party.fleet.lost_after = {"r0": 1, "r1": 1}
    body = {"lora_name": "a", "lora_path": path}
    answer = await party.client.post("/v1/load_lora_adapter", json=body)
    error = error_of(answer, 503)
    assert (error["type"], "it may have done it" in str(error["message"])) == (
        "ChangeUnknownError", True,
    )  # fmt: skip
    assert len(party.fleet.asked) == 1


async def test_without_a_catalog_adapters_are_not_changed_on_one_replica_alone(
    tmp_path: Path,
) -> None:
    party = Party(ServerConfig(), has_catalog=False)
    async with party.client as client:
        body = {"lora_name": "a", "lora_path": write_adapter(tmp_path / "a", "weights")}
        answer = await client.post("/v1/load_lora_adapter", json=body)
        assert "lora_catalog" in str(error_of(answer, 400)["message"])
        assert (await client.get("/v1/loras")).status_code == 200
    assert [await engine.list_adapters() for engine in party.engines] == [[], []]


async def test_a_replica_without_an_engine_passes_its_requests_on(party: Party) -> None:
    party.engines[0].is_alive = False
    for _ in range(4):
        assert (await party.client.post("/v1/completions", json=PROMPT)).status_code == 200
    assert {*party.fleet.asked} == {"r1"}  # its report says that it takes none
    party.engines[1].is_alive = False
    party.fleet.asked.clear()
    answer = await party.client.post("/v1/completions", json=PROMPT)
    assert "engine" in str(error_of(answer, 503)["message"])  # the replica's own words
    assert party.fleet.asked[:2] == ["r0", "r1"]
    assert len(party.fleet.asked) == 3, "there is no other one"


async def test_a_client_that_leaves_ends_its_request(party: Party) -> None:
    for engine in party.engines:
        engine.gate.clear()
    call = asyncio.create_task(party.client.post("/v1/completions", json=PROMPT))
    await eventually(lambda: any(engine.growing for engine in party.engines), 60)
    call.cancel()
    await eventually(lambda: any(engine.ended_early for engine in party.engines), 60)


async def test_an_adapter_is_asked_where_it_was_loaded(party: Party, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", "weights")
    await party.engines[1].load_lora_adapter("a", path)
    for name in ("a", f"{MODEL}:a"):
        answer = await party.client.post("/v1/completions", json=PROMPT | {"model": name})
        assert answer.status_code == 200
    header = {"X-Amzn-SageMaker-Adapter-Identifier": "a"}
    assert (await party.client.post("/invocations", json=PROMPT, headers=header)).status_code == 200
    sglang = {"text": "Count", "lora_path": "a", "sampling_params": {"max_new_tokens": 4}}
    assert (await party.client.post("/generate", json=sglang)).status_code == 200
    assert party.fleet.asked == ["r1"] * 4


async def test_prompts_that_begin_alike_go_to_one_replica(party: Party) -> None:
    def chat(*texts: str) -> Json:
        return {
            "model": MODEL,
            "max_tokens": 1,
            "messages": [{"role": "user", "content": text} for text in texts],
        }

    for number in range(8):
        asked = []
        for texts in ([f"{number} " * 140], [f"{number} " * 140, "More"]):
            answer = await party.client.post("/v1/chat/completions", json=chat(*texts))
            assert answer.status_code == 200, answer.text
            asked.append(party.fleet.asked[-1])
        assert asked[0] == asked[1]
    assert {*party.fleet.asked} == {"r0", "r1"}


async def test_what_concerns_all_replicas_reaches_all(party: Party) -> None:
    client = party.client
    assert (await client.post("/reset_prefix_cache")).status_code == 200
    assert (await client.post("/pause?mode=keep")).status_code == 200
    assert [engine.is_paused for engine in party.engines] == [True, True]
    calls = [asyncio.create_task(client.post("/v1/completions", json=PROMPT)) for _ in range(12)]
    await eventually(lambda: all(engine.growing for engine in party.engines), 60)
    await eventually(lambda: sum(len(engine.growing) for engine in party.engines) == 12, 60)
    assert (await client.get("/load")).json()["server_load"] >= 12
    listed = (await client.get("/v1/requests")).json()
    assert len(listed["data"]) == listed["num_requests"] == 12
    assert (await client.post("/resume")).status_code == 200
    assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200] * 12
    assert [len(engine.resets) for engine in party.engines] == [1, 1]


async def test_metrics_of_all_replicas_stand_on_one_page(party: Party) -> None:
    party.engines[1].metrics.count_restart()
    answer = await party.client.get("/metrics")
    assert answer.headers["content-length"] == str(len(answer.content))
    page = answer.text
    for name in ("r0", "r1"):
        assert re.search(rf'^vllm:num_requests_running{{replica="{name}",', page, re.M)
    families = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE")]
    assert len(families) == len(set(families))


async def test_a_kept_response_is_found_on_the_replica_that_has_it() -> None:
    party = Party(ServerConfig(), "round-robin")
    async with party.client as client:
        first = (await client.post("/v1/responses", json={"model": MODEL, "input": "One"})).json()
        for _ in range(2):
            again = await client.get(f"/v1/responses/{first['id']}")
            assert again.json() == first
        for _ in range(2):
            body = {"model": MODEL, "input": "Two", "previous_response_id": first["id"]}
            assert (await client.post("/v1/responses", json=body)).status_code == 200
        assert len({*party.fleet.asked}) == 1
        body["previous_response_id"] = "resp_none"
        error_of(await client.post("/v1/responses", json=body), 404)
        assert (await client.delete(f"/v1/responses/{first['id']}")).status_code == 200
        error_of(await client.get(f"/v1/responses/{first['id']}"), 404)


async def test_a_stream_comes_as_it_is_made(party: Party) -> None:
    answer = await party.client.post("/v1/completions", json=PROMPT | {"stream": True})
    single = await client_for(FakeEngine()).post("/v1/completions", json=PROMPT | {"stream": True})
    assert [e["choices"] for e in events(answer.text)] == [
        e["choices"] for e in events(single.text)
    ]
