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


@pytest.mark.parametrize("path", READ)
async def test_head_is_answered_like_get_without_a_body(engine: FakeEngine, path: str) -> None:
    config = ServerConfig(enable_tokenizer_info_endpoint=True)
    async with serving(engine, config) as url, httpx.AsyncClient(base_url=url) as client:
        got, head = await client.get(path), await client.head(path)
        assert head.status_code == got.status_code == 200
        assert head.content == b""
        assert (await client.get("/version")).status_code == 200, "nothing was left on the wire"


async def test_other_methods_are_refused_with_those_that_there_are(engine: FakeEngine) -> None:
    async with serving(engine) as url, httpx.AsyncClient(base_url=url) as client:
        response = await client.put("/health")
        assert (response.status_code, response.headers["allow"]) == (405, "GET, HEAD")
        response = await client.head("/v1/completions")
        assert (response.status_code, response.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", path) for path in READ),
        *((each.method.upper(), each.path) for each in OPERATIONS if each.generates),
    ],
)
async def test_a_path_with_a_line_break_behind_it_is_another(
    engine: FakeEngine, method: str, path: str
) -> None:
    """Else a request would be answered that the middleware takes for another, without its line."""
    async with client_for(engine) as client:
        assert (await client.request(method, f"{path}%0A", json={})).status_code == 404


async def test_a_name_may_hold_any_character(engine: FakeEngine) -> None:
    async with client_for(engine) as client:
        answer = await client.get("/v1/models/a%0Ab%0A")
        assert "a\\nb\\n" in answer.text
