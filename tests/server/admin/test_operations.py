from __future__ import annotations

from pathlib import Path

import httpx
import pytest

import lora_serve
from lora_serve.config import ServerConfig
from lora_serve.identity import EVERYTHING
from tests.fakes.engine import FakeEngine, write_adapter
from tests.server.clients import client_for, error_of


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/v1/health", "/v2/health/ready"])
async def test_platforms_ask_for_readiness_under_their_names(
    engine: FakeEngine, client: httpx.AsyncClient, path: str
) -> None:
    assert (await client.get(path)).status_code == 200
    engine.is_alive = False
    error_of(await client.get(path), 503)


@pytest.mark.parametrize("path", ["/livez", "/v1/health/live", "/v2/health/live"])
async def test_a_server_that_starts_its_engine_again_is_alive(
    engine: FakeEngine, client: httpx.AsyncClient, path: str
) -> None:
    engine.is_alive = False
    assert (await client.get(path)).status_code == 200


@pytest.mark.parametrize(
    ("method", "url"), [("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")]
)
async def test_health_follows_the_engine(
    engine: FakeEngine, client: httpx.AsyncClient, method: str, url: str
) -> None:
    response = await client.request(method, url)
    assert (response.status_code, response.content) == (200, b"")
    engine.is_alive = False
    error_of(await client.request(method, url), 503)


async def test_the_version_is_the_packages(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": lora_serve.__version__}


async def test_the_prefix_cache_is_reset_for_all_or_for_one_adapter(
    engine: FakeEngine, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    await engine.load_lora_adapter("tenant", write_adapter(tmp_path, "ALPHA"))
    url = "/reset_prefix_cache"
    for response in (
        await client.post(url),
        await client.post(url, json={}),
        await client.post(f"{url}?lora_name=tenant"),
        await client.post(url, json={"lora_name": "tenant"}),
    ):
        assert response.status_code == 200
        assert response.json() == {"success": True}
    assert engine.resets == [EVERYTHING, EVERYTHING, "tenant", "tenant"]


async def test_a_reset_of_what_is_not_there_is_refused(client: httpx.AsyncClient) -> None:
    error_of(await client.post("/reset_prefix_cache?lora_name=nobody"), 404)
    error = error_of(await client.post("/reset_prefix_cache?reset_internal=true"), 400)
    assert error["param"] == "reset_internal"


async def test_a_reset_takes_what_vllms_clients_send(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    url = "/reset_prefix_cache?reset_running_requests=true&reset_external=false"
    assert (await client.post(url)).json() == {"success": True}
    assert engine.resets == [EVERYTHING]
    error = error_of(await client.post("/reset_prefix_cache?reset_external=maybe"), 400)
    assert error["param"] == "reset_external"


async def test_the_address_alone_says_where_to_go_on(client: httpx.AsyncClient) -> None:
    told = (await client.get("/")).json()
    paths = {name: told[name] for name in ("models", "health", "docs", "ui")}
    assert paths == {"models": "/v1/models", "health": "/health", "docs": "/docs", "ui": "/ui"}
    for path in paths.values():
        assert (await client.get(path)).status_code == 200


async def test_what_is_not_served_is_not_named_and_a_prefix_is(engine: FakeEngine) -> None:
    config = ServerConfig(disable_fastapi_docs=True, disable_ui=True, root_path="/llm")
    async with client_for(engine, config) as client:
        told = (await client.get("/llm/")).json()
    assert told["models"] == "/llm/v1/models"
    assert not {"docs", "ui"} & set(told)
