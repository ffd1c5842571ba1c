from __future__ import annotations

import httpx
import pytest

from lora_serve.config import ServerConfig
from lora_serve.server.routes import OPERATIONS
from tests.fakes.engine import FakeEngine
from tests.server.clients import client_for, serving

READ = sorted(
    operation.path
    for operation in OPERATIONS
    if operation.method == "get" and "{" not in operation.path
)


async def test_head_is_answered_like_get_without_a_body(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lora_serve.server.admin.metrics.PAGE_SECONDS", 0.0)
    config = ServerConfig(enable_tokenizer_info_endpoint=True)
    async with serving(engine, config) as url, httpx.AsyncClient(base_url=url) as client:
        for path in READ:
            got, head = await client.get(path), await client.head(path)
            assert head.status_code == got.status_code == 200, path
            assert head.content == b"", path
            after = await client.get("/version")
            assert after.status_code == 200, f"{path} left something on the wire"


async def test_other_methods_are_refused_with_those_that_there_are(engine: FakeEngine) -> None:
    async with serving(engine) as url, httpx.AsyncClient(base_url=url) as client:
        response = await client.put("/health")
        assert (response.status_code, response.headers["allow"]) == (405, "GET, HEAD")
        response = await client.head("/v1/completions")
        assert (response.status_code, response.headers["allow"]) == (405, "POST")
        response = await client.options("/v1/completions")
        assert (response.status_code, response.headers["allow"]) == (204, "POST")
        assert response.content == b""


async def test_a_path_with_a_line_break_behind_it_is_another(engine: FakeEngine) -> None:
    """Else a request would be answered that the middleware takes for another, without its line."""
    asked = [("GET", path) for path in READ]
    asked += [(each.method.upper(), each.path) for each in OPERATIONS if each.generates]
    async with client_for(engine) as client:
        for method, path in asked:
            assert (await client.request(method, f"{path}%0A", json={})).status_code == 404, path


async def test_a_name_may_hold_any_character(engine: FakeEngine) -> None:
    async with client_for(engine) as client:
        answer = await client.get("/v1/models/a%0Ab%0A")
        assert "a\\nb\\n" in answer.text
