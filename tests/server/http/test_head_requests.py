from __future__ import annotations

import httpx
import pytest

from lora_serve.config import ServerConfig
from lora_serve.server.routes import OPERATIONS
from tests.fakes.engine import FakeEngine
from tests.server.clients import serving

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
