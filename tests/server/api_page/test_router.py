"""The page at /docs: from this server alone, with keys and without."""

from __future__ import annotations

import re

import pytest

from lora_serve.config import ServerConfig
from lora_serve.server.api_page.files import OURS, PAGE_FILES, PageFile
from lora_serve.server.api_page.router import POLICY
from tests.fakes.engine import FakeEngine
from tests.server.clients import client_for, error_of

KEYS = ServerConfig(api_key=("user",), root_path="/llm")


async def test_its_files_need_no_key_and_the_document_does(engine: FakeEngine) -> None:
    async with client_for(engine, KEYS) as client:
        for file in PAGE_FILES:
            answer = await client.get(f"/llm{file.path}")
            assert (answer.status_code, answer.content) == (200, file.read())
            assert answer.headers["Content-Security-Policy"] == POLICY
        error_of(await client.get("/llm/openapi.json"), 401)


@pytest.mark.parametrize("file", [file for file in PAGE_FILES if file.package == OURS])
def test_it_names_files_of_this_server_alone_and_finds_them_below_any_prefix(
    file: PageFile,
) -> None:
    text = file.read().decode()
    assert not re.findall(r"https?://|[\"'(]/", text)
    named = set(re.findall(r'(?:src|href)="([^"]+)"', text))
    assert {f"/{name}" for name in named} <= {file.path for file in PAGE_FILES}
