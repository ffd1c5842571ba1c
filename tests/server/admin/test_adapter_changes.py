"""GET /adapter_changes keeps what a roll-back needs, and no more than so much of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from lora_serve.config import ServerConfig
from lora_serve.server.admin.adapter_changes import MAX_CHANGES
from tests.fakes.engine import FakeEngine, write_adapter
from tests.server.clients import client_for, error_of

LOAD, UNLOAD, CHANGES = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapter_changes"
KEYS = ServerConfig(api_key=("user",), admin_api_key=("root",))
ROOT, USER = ({"Authorization": f"Bearer {key}"} for key in ("root", "user"))


async def changes(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    answer = await client.get(CHANGES, headers=ROOT)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


async def test_a_change_tells_what_stood_there_before_and_where_it_lies(tmp_path: Path) -> None:
    a, b = (write_adapter(tmp_path / name, name) for name in ("a", "b"))
    async with client_for(FakeEngine(), KEYS) as client:
        for path in (a, b):
            body = {"lora_name": "x", "lora_path": path, "load_inplace": True}
            await client.post(LOAD, json=body, headers=ROOT)
        await client.post(UNLOAD, json={"lora_name": "x"}, headers=ROOT)
        unloaded, replaced, loaded = await changes(client)
    assert (loaded["old_path"], loaded["new_path"]) == (None, a)
    assert (replaced["old_path"], replaced["new_path"]) == (a, b)
    assert replaced["old_digest"] == loaded["new_digest"] != replaced["new_digest"]
    assert (unloaded["old_path"], unloaded["new_path"], unloaded["new_digest"]) == (b, None, None)
    assert {each["by"] for each in (loaded, replaced, unloaded)} == {"admin key 1"}


async def test_a_failed_change_tells_why_and_names_no_new_version(tmp_path: Path) -> None:
    a = write_adapter(tmp_path, "A")
    async with client_for(FakeEngine(), KEYS) as client:
        for path in (a, "/nowhere"):
            body = {"lora_name": "x", "lora_path": path, "load_inplace": True}
            await client.post(LOAD, json=body, headers=ROOT)
        failed, _ = await changes(client)
    assert "/nowhere" in failed["error"]
    assert failed["old_path"] == a
    assert failed["new_path"] is failed["new_digest"] is None


async def test_callers_that_may_change_nothing_neither_see_it_nor_fill_it() -> None:
    async with client_for(FakeEngine(), KEYS) as client:
        await client.post(LOAD, json={"lora_name": "x", "lora_path": "/a"}, headers=USER)
        assert await changes(client) == []
        error_of(await client.get(CHANGES, headers=USER), 403)


async def test_only_the_newest_are_kept() -> None:
    async with client_for(FakeEngine()) as client:
        for number in range(MAX_CHANGES + 3):
            await client.post(UNLOAD, json={"lora_name": f"x{number}" + "y" * 9999})
        kept = await changes(client)
    assert len(kept) == MAX_CHANGES
    assert kept[0]["lora_name"].startswith(f"x{MAX_CHANGES + 2}")
    assert len(kept[0]["lora_name"]) <= 500
