"""SGLang's, Dynamo's and SageMaker's routes for adapters do what vLLM's do, in their words."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from lora_serve.errors import InvalidRequestError
from lora_serve.server.admin.protocol import path_of_uri
from tests.fakes.engine import FakeEngine, fake_config, write_adapter
from tests.server.clients import client_for, error_of


async def digest(engine: FakeEngine, name: str) -> str:
    (found,) = [info for info in await engine.list_adapters() if info.name == name]
    return found.digest


async def test_the_root_routes_load_replace_and_unload(
    engine: FakeEngine, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    old, new = (write_adapter(tmp_path / name, name) for name in ("old", "new"))
    body = {"lora_name": "policy", "lora_path": old, "pinned": True}
    loaded = (await client.post("/load_lora_adapter", json=body)).json()
    assert loaded == {"loaded_adapters": {"policy": old}, "success": True, "error_message": ""}
    before = await digest(engine, "policy")
    body = {"lora_name": "policy", "lora_path": new}
    assert (await client.post("/load_lora_adapter", json=body)).status_code == 200
    assert await digest(engine, "policy") != before
    error_of(await client.post("/load_lora_adapter", json={**body, "load_inplace": False}), 400)
    left = (await client.post("/unload_lora_adapter", json={"lora_name": "policy"})).json()
    assert left["loaded_adapters"] == {}
    error_of(await client.post("/unload_lora_adapter", json={"lora_name": "policy"}), 404)


async def test_adapters_are_loaded_from_a_source_and_unloaded_by_their_path(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "a b", "ALPHA")
    uri = f"file://{path.replace(' ', '%20')}"
    body = {"lora_name": "org/policy", "source": {"uri": uri}}
    loaded = (await client.post("/v1/loras", json=body)).json()
    assert loaded == {"lora_name": "org/policy", "status": "success"}
    listed = (await client.get("/v1/loras")).json()
    assert listed == {"loras": {"org/policy": path}, "count": 1, "status": "success"}
    assert (await client.delete("/v1/loras/org/policy")).json() == loaded
    error_of(await client.delete("/v1/loras/org/policy"), 404)


async def test_sagemakers_routes_load_and_unload_by_name(
    engine: FakeEngine, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "a", "ALPHA")
    body = {"name": "org/policy", "src": path, "preload": True, "pin": True}
    assert (await client.post("/adapters", json=body)).status_code == 200
    (loaded,) = await engine.list_adapters()
    assert (loaded.name, loaded.path) == ("org/policy", path)
    assert "org/policy" in error_of(await client.post("/adapters", json=body), 400)["message"]
    assert (await client.delete("/adapters/org/policy")).status_code == 200
    assert await engine.list_adapters() == []
    error_of(await client.delete("/adapters/org/policy"), 404)
    error_of(await client.post("/adapters", json={"name": "a", "src": "/nowhere"}), 404)
    assert (
        error_of(await client.post("/adapters", json={"name": "a", "src": ""}), 400)["param"]
        == "src"
    )


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("file:///adapters/a", "/adapters/a"),
        ("file://localhost/adapters/a%20b", "/adapters/a b"),
        ("hf://org/name@main", "org/name@main"),
    ],
)
def test_a_uri_names_a_directory_or_a_repository(uri: str, path: str) -> None:
    assert path_of_uri(uri) == path


@pytest.mark.parametrize(
    "uri", ["", "a", "/a", "file://", "file://host/a", "file:///", "hf://", "hf:///a", "hf://../a"]
)
def test_other_uris_are_refused(uri: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"source\.uri must be"):
        path_of_uri(uri)


async def test_a_uri_of_another_store_is_refused_by_its_field(client: httpx.AsyncClient) -> None:
    body = {"lora_name": "a", "source": {"uri": "s3://bucket/a"}}
    assert error_of(await client.post("/v1/loras", json=body), 400)["param"] == "source.uri"


async def test_without_enable_lora_all_forms_are_refused() -> None:
    async with client_for(FakeEngine(fake_config(enable_lora=False))) as client:
        for method, url, body in (
            ("POST", "/load_lora_adapter", {"lora_name": "a", "lora_path": "/a"}),
            ("POST", "/unload_lora_adapter", {"lora_name": "a"}),
            ("POST", "/v1/loras", {"lora_name": "a", "source": {"uri": "file:///a"}}),
            ("GET", "/v1/loras", None),
            ("DELETE", "/v1/loras/a", None),
            ("POST", "/adapters", {"name": "a", "src": "/a"}),
            ("DELETE", "/adapters/a", None),
        ):
            error_of(await client.request(method, url, json=body), 400)
