from __future__ import annotations

import pytest

from lora_serve.config import ServerConfig
from lora_serve.errors import ConfigError
from lora_serve.server.api_page.files import PAGE_FILES
from tests.fakes.engine import FakeEngine
from tests.server.clients import client_for, error_of


async def test_paths_come_with_the_proxys_prefix_or_without(engine: FakeEngine) -> None:
    config = ServerConfig(root_path="/llm", api_key=("key",))
    async with client_for(engine, config) as client:
        for prefix in ("", "/llm"):
            assert (await client.get(f"{prefix}/health")).status_code == 200
            error_of(await client.get(f"{prefix}/v1/models"), 401)
        for path in ("/llm/llm/health", "/llmhealth", "/other/health"):
            error_of(await client.get(path, headers={"Authorization": "Bearer key"}), 404)
        headers = {"Authorization": "Bearer key"}
        document = (await client.get("/llm/openapi.json", headers=headers)).json()
    assert document["servers"] == [{"url": "/llm"}]


@pytest.mark.parametrize("prefix", ["llm", "/llm/", "/", "/a b", "/v1", "/v1/x"])
def test_a_prefix_that_cannot_be_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match="--root-path"):
        ServerConfig(root_path=prefix)


async def test_the_servers_documents_can_be_left_out(engine: FakeEngine) -> None:
    async with client_for(engine, ServerConfig(disable_fastapi_docs=True)) as client:
        for path in ("/openapi.json", *(file.path for file in PAGE_FILES)):
            error_of(await client.get(path), 404)
