"""The page's files: which there are, how they are served, and that they hold nothing foreign."""

from __future__ import annotations

import re
from importlib.resources import files

import httpx
import pytest

from lora_serve.config import ServerConfig
from lora_serve.server.ui.files import PAGE, UI_FILES, UI_PATH
from lora_serve.server.ui.router import POLICY
from tests.fakes.engine import FakeEngine
from tests.server.clients import client_for, error_of

KEYS = ServerConfig(api_key=("user",), admin_api_key=("root",))
PATHS = (UI_PATH, *(file.path for file in UI_FILES))
STATIC = files("lora_serve.server.ui") / "static"


def test_every_file_of_the_package_is_served_and_no_other() -> None:
    assert {file.name for file in STATIC.iterdir()} == {PAGE, *(file.name for file in UI_FILES)}


@pytest.mark.parametrize("path", PATHS)
async def test_a_file_needs_no_key_and_comes_with_a_strict_policy(
    engine: FakeEngine, path: str
) -> None:
    async with client_for(engine, KEYS) as client:
        answer = await client.get(path)
    assert answer.status_code == 200
    assert answer.content
    assert answer.headers["Content-Security-Policy"] == POLICY
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert "unsafe" not in POLICY
    assert "frame-ancestors 'none'" in POLICY


async def test_the_page_is_not_served_where_it_is_disabled(engine: FakeEngine) -> None:
    async with client_for(engine, ServerConfig(disable_ui=True)) as client:
        for path in PATHS:
            error_of(await client.get(path), 404)


async def test_no_other_file_is_served(client: httpx.AsyncClient) -> None:
    for path in ("/ui/", "/ui/index.html", "/ui/../files.py", "/ui/%2e%2e/files.py", "/ui/x.js"):
        assert (await client.get(path)).status_code == 404


@pytest.mark.parametrize("name", [PAGE, *(file.name for file in UI_FILES)])
def test_a_file_names_no_other_server_and_holds_nothing_that_the_policy_forbids(name: str) -> None:
    text = (STATIC / name).read_text(encoding="utf-8")
    foreign = set(re.findall(r"https?://[^\s\"']+", text)) - {"http://www.w3.org/2000/svg"}
    assert not foreign
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|eval\(|localStorage", text)
    if name == PAGE:
        assert not re.findall(r"<style|<script(?! type=\"module\" src=)|\son\w+=|style=", text)


async def test_the_page_asks_for_its_files_below_a_proxys_prefix(engine: FakeEngine) -> None:
    async with client_for(engine, ServerConfig(root_path="/llm")) as client:
        page = (await client.get("/llm/ui")).text
        links = re.findall(r"(?:src|href)=\"([^\"#]+)\"", page)
        assert links
        for link in links:
            assert (await client.get(str(httpx.URL("/llm/ui").join(link)))).status_code == 200
