"""GET /v1/requests shows each caller what it may know of; /v1/caller tells what it may do."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from lora_serve.config import ServerConfig
from tests.fakes.engine import FakeEngine, write_adapter
from tests.server.clients import client_for, error_of, eventually

KEYS = ServerConfig(api_key=("user", "other"), admin_api_key=("root",))
HUGE = "limit=000000001" + "9" * 5000  # of more digits than Python reads
PROMPT = "a prompt that must not be told"


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"} if name else {}


async def listed(client: httpx.AsyncClient, name: str, query: str = "") -> dict[str, Any]:
    answer = await client.get(f"/v1/requests{query}", headers=key(name))
    assert answer.status_code == 200, answer.text
    assert PROMPT not in answer.text
    return answer.json()


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        (KEYS, {"root": ("all", 3), "user": ("own key", 2), "other": ("own key", 1)}),
        (
            ServerConfig(api_key=("user", "other")),
            {"user": ("own key", 2), "other": ("own key", 1)},
        ),
        (ServerConfig(admin_api_key=("root",)), {"root": ("all", 3), "": ("none", 0)}),
        (ServerConfig(), {"": ("all", 3)}),
    ],
    ids=["both", "keys", "admin", "none"],
)
async def test_a_caller_sees_its_own_requests_and_an_admin_all(
    engine: FakeEngine, config: ServerConfig, shown: dict[str, tuple[str, int]]
) -> None:
    engine.gate.clear()
    async with client_for(engine, config) as client:
        callers = ("user", "user", "other")
        asked = [
            asyncio.create_task(
                client.post("/v1/completions", json={"prompt": PROMPT}, headers=key(name))
            )
            for name in callers
        ]
        await eventually(lambda: len(engine.growing) == len(callers))
        for name, (shows, number) in shown.items():
            answer = await listed(client, name)
            assert (answer["shows"], answer["num_requests"]) == (shows, number)
            assert len(answer["data"]) == number
        engine.gate.set()
        for answer in await asyncio.gather(*asked):
            assert answer.status_code == 200
        assert (await listed(client, next(iter(shown))))["data"] == []


async def test_a_request_is_told_with_its_route_its_adapter_and_the_id_that_aborts_it(
    engine: FakeEngine, tmp_path: Any
) -> None:
    await engine.load_lora_adapter("x", write_adapter(tmp_path / "x", "X"))
    engine.gate.clear()
    async with client_for(engine) as client:
        body = {"model": "x", "messages": [{"role": "user", "content": PROMPT}], "n": 2}
        asked = asyncio.create_task(
            client.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "mine"})
        )
        await eventually(lambda: engine.growing)
        ((told,), plain) = [(await listed(client, ""))[name] for name in ("data", "object")]
        assert plain == "list"
        assert (told["id"], told["route"], told["adapter"]) == ("mine", "/v1/chat/completions", "x")
        assert (told["state"], told["num_choices"]) == ("running", 2)
        assert told["num_prompt_tokens"] >= len(PROMPT)
        aborted = await client.post("/abort_requests", json={"request_ids": [told["id"]]})
        assert aborted.json()["aborted"] == 1
        engine.gate.set()
        await asked


async def test_the_newest_come_first_and_only_so_many(engine: FakeEngine) -> None:
    engine.gate.clear()
    async with client_for(engine) as client:
        asked = []
        for name in ("a", "b", "c"):
            headers = {"X-Request-Id": name}
            post = client.post("/v1/completions", json={"prompt": "x"}, headers=headers)
            asked.append(asyncio.create_task(post))
            await eventually(lambda: len(engine.growing) == len(asked))
        answer = await listed(client, "", "?limit=2")
        assert [each["id"] for each in answer["data"]] == ["c", "b"]
        assert answer["num_requests"] == 3
        engine.gate.set()
        await asyncio.gather(*asked)


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "limit=-1", "page=2", HUGE])
async def test_a_query_that_cannot_be_read_is_refused(
    client: httpx.AsyncClient, query: str
) -> None:
    assert error_of(await client.get(f"/v1/requests?{query}"), 400)["param"] in ("limit", "page")


@pytest.mark.parametrize(
    ("config", "name", "may_change", "may_read"),
    [
        (ServerConfig(), "", True, True),
        (KEYS, "user", False, False),
        (KEYS, "root", True, True),
        (ServerConfig(api_key=("user",)), "user", False, True),
        (ServerConfig(admin_api_key=("root",)), "", False, False),
        (ServerConfig(api_key=("user",), admin_api_key=("root",), metrics_need_key=False),
         "user", False, True),
        (ServerConfig(metrics_port=9), "", True, False),
    ],
)  # fmt: skip
async def test_a_caller_is_told_what_it_may_do_and_may_do_that(
    engine: FakeEngine, config: ServerConfig, name: str, may_change: bool, may_read: bool
) -> None:
    async with client_for(engine, config) as client:
        told = (await client.get("/v1/caller", headers=key(name))).json()
        assert (told["may_change_server"], told["may_read_metrics"]) == (may_change, may_read)
        changed = await client.post("/reset_prefix_cache", headers=key(name))
        assert (changed.status_code == 200) is may_change
        metrics = await client.get("/metrics", headers=key(name))
        assert (metrics.status_code == 200) is may_read
