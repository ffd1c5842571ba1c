from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from msgspec import structs

from lora_serve.config import ServerConfig
from tests.fakes.engine import FakeEngine, fake_config, write_adapter
from tests.server.clients import client_for, error_of


async def test_the_base_model_is_listed_under_each_of_its_names(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == ["base/model", "alias"]
    for card in listed["data"]:
        assert card["object"] == "model"
        assert card["owned_by"] == "lora-serve"
        assert card["root"] == "/models/tiny"
        assert card["parent"] is None
        assert card["max_model_len"] == 512
        assert "digest" not in card
        assert "quantization" not in card


async def test_a_quantised_model_says_so() -> None:
    config = fake_config()
    model = replace(config.model, quantization="int8")
    async with client_for(FakeEngine(replace(config, model=model))) as client:
        card = (await client.get("/v1/models/alias")).json()
    assert card["quantization"] == "int8"


async def test_an_adapter_is_listed_with_its_version_and_where_it_is(
    engine: FakeEngine, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    info = await engine.load_lora_adapter("tenant", write_adapter(tmp_path, "ALPHA"))
    card = (await client.get("/v1/models")).json()["data"][-1]
    assert card == {
        "id": "tenant",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "lora-serve",
        "root": str(tmp_path),
        "parent": "base/model",
        "max_model_len": 512,
        "digest": info.digest,
        "generation": 0,
        "rank": 16,
        "residency": "resident",
        "pinned": False,
        "num_leases": 0,
        "num_bytes": 5,
    }
    for model in ("tenant", "base/model:tenant"):
        assert (await client.get(f"/v1/models/{model}")).json() == card


async def test_created_does_not_change_from_call_to_call(client: httpx.AsyncClient) -> None:
    first = (await client.get("/v1/models")).json()
    assert (await client.get("/v1/models")).json() == first


async def test_a_name_with_a_slash_can_be_shown(client: httpx.AsyncClient) -> None:
    for url in ("/v1/models/base/model", "/v1/models/base%2Fmodel"):
        assert (await client.get(url)).json()["id"] == "base/model"


@pytest.mark.parametrize("model", ["nobody", "base", "base/model/", "base/model:", "%ff", "%00"])
async def test_an_unknown_model_is_a_404(client: httpx.AsyncClient, model: str) -> None:
    error = error_of(await client.get(f"/v1/models/{model}"), 404)
    assert "does not exist" in error["message"]


async def test_an_unknown_model_is_told_of_a_few_that_there_are(
    engine: FakeEngine, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    for name in "abcde":
        await engine.load_lora_adapter(name, write_adapter(tmp_path / name, name))
    told = error_of(await client.get("/v1/models/nobody"), 404)["message"]
    assert told == (
        "The model `nobody` does not exist. There is `base/model`, `alias`, `a` and 4 more."
    )
    asked = {"model": "base/model:nobody", "prompt": "hi"}
    told = error_of(await client.post("/v1/completions", json=asked), 404)["message"]
    assert told.startswith(
        "The model `base/model:nobody` does not exist. There is `a`, `b`, `c` and 2 more. "
        "Ask for the base model `base/model`, or load"
    )


async def test_without_lora_the_engine_is_not_asked_for_adapters() -> None:
    engine = FakeEngine(fake_config(enable_lora=False))
    engine.is_alive = False  # a question would fail
    async with client_for(engine) as client:
        assert len((await client.get("/v1/models")).json()["data"]) == 2


@pytest.mark.parametrize(
    ("config", "key", "sees_paths"),
    [
        (ServerConfig(), "", True),
        (ServerConfig(host="0.0.0.0"), "", False),
        (ServerConfig(api_key=("user",)), "user", False),
        (ServerConfig(api_key=("user",), admin_api_key=("admin",)), "user", False),
        (ServerConfig(api_key=("user",), admin_api_key=("admin",)), "admin", True),
        (ServerConfig(api_key=("user",), allow_runtime_lora_updating=True), "user", True),
    ],
)
async def test_paths_are_shown_to_those_who_may_change_the_server(
    engine: FakeEngine, tmp_path: Path, config: ServerConfig, key: str, sees_paths: bool
) -> None:
    await engine.load_lora_adapter("tenant", write_adapter(tmp_path, "ALPHA"))
    async with client_for(engine, config) as client:
        client.headers["Authorization"] = f"Bearer {key}"
        listed = (await client.get("/v1/models")).json()["data"]
        alone = (await client.get("/v1/models/tenant")).json()
    roots = [card["root"] for card in (*listed, alone)]
    if sees_paths:
        assert roots == ["/models/tiny", "/models/tiny", str(tmp_path), str(tmp_path)]
    else:
        assert roots == ["base/model", "alias", "tenant", "tenant"]
        assert not alone.keys() & {"residency", "num_leases"}, "they tell what others use"


@pytest.mark.parametrize(("key", "shown"), [("user", "tenant"), ("admin", "s3://bucket/a")])
async def test_a_bucket_is_shown_to_those_who_may_change_the_server(
    engine: FakeEngine, tmp_path: Path, key: str, shown: str
) -> None:
    loaded = await engine.load_lora_adapter("tenant", write_adapter(tmp_path, "ALPHA"))
    engine._adapters["tenant"] = structs.replace(loaded, path="s3://bucket/a")
    keys = ServerConfig(api_key=("user",), admin_api_key=("admin",))
    async with client_for(engine, keys) as client:
        client.headers["Authorization"] = f"Bearer {key}"
        assert (await client.get("/v1/models/tenant")).json()["root"] == shown


async def test_a_hub_id_is_shown_to_all() -> None:
    config = fake_config()
    model = replace(config.model, model="org/tiny")
    engine = FakeEngine(replace(config, model=model))
    async with client_for(engine, ServerConfig(api_key=("user",))) as client:
        client.headers["Authorization"] = "Bearer user"
        card = (await client.get("/v1/models/alias")).json()
    assert card["root"] == "org/tiny"


async def test_an_activated_adapter_tells_where_it_begins(
    engine: FakeEngine, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    info = await engine.load_lora_adapter("tenant", write_adapter(tmp_path, "ALPHA"))
    engine._adapters["tenant"] = structs.replace(info, invocation_tokens=(3, 4))
    card = (await client.get("/v1/models/tenant")).json()
    assert card["alora_invocation_tokens"] == [3, 4]
