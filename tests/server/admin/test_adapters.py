from __future__ import annotations

import hashlib
import json
from pathlib import Path

import httpx
import pytest

from lora_serve.config import EngineConfig, LoRAConfig, ModelConfig
from tests.fakes.engine import FakeEngine, fake_config, write_adapter
from tests.server.clients import client_for, error_of

LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"


async def load(client: httpx.AsyncClient, name: str, path: str, **body: object) -> httpx.Response:
    return await client.post(LOAD, json={"lora_name": name, "lora_path": path, **body})


async def said(client: httpx.AsyncClient, model: str) -> str:
    response = await client.post("/v1/completions", json={"model": model, "prompt": "hi"})
    return response.json()["choices"][0]["text"]


async def test_a_loaded_adapter_answers(client: httpx.AsyncClient, tmp_path: Path) -> None:
    response = await load(client, "tenant", write_adapter(tmp_path, "ALPHA"))
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain")
    assert response.text == "Success: LoRA adapter 'tenant' added successfully."
    assert (await said(client, "tenant")).startswith("ALPHA")


async def test_the_answer_says_which_version_stands_there_and_whether_it_is_another(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "a", "one")
    body = {"lora_name": "tenant", "lora_path": path, "load_inplace": True}
    told = []
    for weights in ("one", "one", "two"):
        write_adapter(tmp_path / "a", weights)
        response = await client.post("/v1/load_lora_adapter", json=body)
        assert response.text == "Success: LoRA adapter 'tenant' added successfully."
        told.append((response.headers["X-LoRA-Digest"], response.headers["X-LoRA-Unchanged"]))
        assert response.headers["X-LoRA-Generation"] == "0"
    digests = [hashlib.sha256(weights).hexdigest() for weights in (b"one", b"one", b"two")]
    assert told == list(zip(digests, ("false", "true", "false"), strict=True))


async def test_a_caller_who_accepts_json_gets_the_same_as_json(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    body = {"lora_name": "tenant", "lora_path": write_adapter(tmp_path / "a", "one")}
    headers = {"Accept": "application/json"}
    response = await client.post("/v1/load_lora_adapter", json=body, headers=headers)
    assert response.json() == {
        "message": "Success: LoRA adapter 'tenant' added successfully.",
        "lora_name": "tenant",
        "digest": hashlib.sha256(b"one").hexdigest(),
        "generation": 0,
        "unchanged": False,
    }


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/load_lora_adapter", {"lora_name": "a", "lora_path": "PATH"}),
        ("/v1/loras", {"lora_name": "a", "source": {"uri": "file://PATH"}}),
        ("/adapters", {"name": "a", "src": "PATH"}),
    ],
)
async def test_other_forms_of_the_call_have_the_same_headers(
    route: str, body: object, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    path = write_adapter(tmp_path / "a", "one")
    text = json.dumps(body).replace("PATH", path)
    response = await client.post(route, content=text, headers={"Content-Type": "application/json"})
    assert response.status_code == 200, response.text
    assert response.headers["X-LoRA-Digest"] == hashlib.sha256(b"one").hexdigest()
    assert response.headers["X-LoRA-Unchanged"] == "false"


async def test_an_adapter_of_plainly_another_model_is_loaded_with_a_warning(
    tmp_path: Path,
) -> None:
    config = EngineConfig(model=ModelConfig(model="org/tiny"), lora=LoRAConfig(enable_lora=True))
    async with client_for(FakeEngine(config)) as client:
        response = await load(client, "tenant", write_adapter(tmp_path, "foreign"))
        assert response.status_code == 200
        assert response.text.startswith("Success: LoRA adapter 'tenant' added successfully. Warn")
        assert "org/foreign" in response.text
        assert (await said(client, "tenant")).startswith("foreign")


async def test_a_name_is_replaced_in_place_and_only_so(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    a = write_adapter(tmp_path / "a", "ALPHA")
    b = write_adapter(tmp_path / "b", "BETA")
    await load(client, "tenant", a)
    error = error_of(await load(client, "tenant", b), 400)
    assert error["type"] == "InvalidUserInput"
    assert error["message"] == (
        "The lora adapter 'tenant' has already been loaded. If you want to load the adapter in "
        "place, set 'load_inplace' to True."
    )
    assert (await said(client, "tenant")).startswith("ALPHA")
    assert (await load(client, "tenant", b, load_inplace=True)).status_code == 200
    assert (await said(client, "tenant")).startswith("BETA")


async def test_a_load_may_say_which_digest_it_wants(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    a = write_adapter(tmp_path / "a", "ALPHA")
    b = write_adapter(tmp_path / "b", "BETA")
    await load(client, "tenant", a)
    alpha = (await client.get("/v1/models/tenant")).json()["digest"]
    refused = await load(client, "tenant", b, load_inplace=True, digest=alpha)
    assert error_of(refused, 400)["param"] == "digest"
    assert error_of(await load(client, "tenant", b, digest=alpha.upper()), 400)
    assert (await said(client, "tenant")).startswith("ALPHA")
    assert (await load(client, "tenant", a, load_inplace=True, digest=alpha)).status_code == 200


async def test_an_unloaded_adapter_is_gone(client: httpx.AsyncClient, tmp_path: Path) -> None:
    await load(client, "tenant", write_adapter(tmp_path, "ALPHA"))
    response = await client.post(UNLOAD, json={"lora_name": "tenant", "lora_int_id": 3})
    assert response.status_code == 200
    assert response.text == "Success: LoRA adapter 'tenant' removed successfully."
    body = {"model": "tenant", "prompt": "hi"}
    error_of(await client.post("/v1/completions", json=body), 404)


async def test_an_adapter_can_be_pinned(client: httpx.AsyncClient, tmp_path: Path) -> None:
    await load(client, "tenant", write_adapter(tmp_path, "ALPHA"), pinned=True)
    assert (await client.get("/v1/models/tenant")).json()["pinned"] is True


async def test_no_adapter_at_the_path_is_a_404(client: httpx.AsyncClient) -> None:
    error = error_of(await load(client, "tenant", "/nowhere"), 404)
    assert error["type"] == "NotFoundError"
    assert error["message"] == (
        "Loading lora tenant failed: No adapter found for /nowhere: there is no such directory"
    )


async def test_a_broken_adapter_is_a_400_with_every_finding(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    error = error_of(await load(client, "tenant", write_adapter(tmp_path, "broken")), 400)
    assert error["type"] == "InvalidUserInput"
    assert "rank 1024 is above 64; use_dora is not supported" in error["message"]


async def test_an_unknown_name_cannot_be_unloaded(client: httpx.AsyncClient) -> None:
    error = error_of(await client.post(UNLOAD, json={"lora_name": "tenant"}), 404)
    assert error["message"] == "The lora adapter 'tenant' cannot be found."


@pytest.mark.parametrize(
    ("name", "path", "param", "what"),
    [
        ("", "/a", "lora_name", "'lora_name'"),
        ("a", "", "lora_path", "'lora_path'"),
        ("", "", "lora_name", "Both 'lora_name' and 'lora_path'"),
    ],
)
async def test_name_and_path_must_not_be_empty(
    client: httpx.AsyncClient, name: str, path: str, param: str, what: str
) -> None:
    error = error_of(await load(client, name, path), 400)
    assert error["message"] == f"{what} must be provided."
    assert error["param"] == param
    assert error["type"] == "InvalidUserInput"


async def test_an_empty_name_cannot_be_unloaded(client: httpx.AsyncClient) -> None:
    error = error_of(await client.post(UNLOAD, json={"lora_name": ""}), 400)
    assert error["message"] == "'lora_name' needs to be provided to unload a LoRA adapter."


async def test_missing_fields_are_all_named(client: httpx.AsyncClient) -> None:
    error = error_of(await client.post(LOAD, json={}), 400)
    assert error["message"] == (
        "lora_name: this field is required; lora_path: this field is required"
    )


@pytest.mark.parametrize("name", ["base/model", "alias", "base/model:x", "alias:"])
async def test_a_base_models_name_is_taken(
    client: httpx.AsyncClient, tmp_path: Path, name: str
) -> None:
    error = error_of(await load(client, name, write_adapter(tmp_path, "ALPHA")), 400)
    assert error["message"] == f"The lora adapter '{name}' conflicts with a served base model."
    assert error["param"] == "lora_name"


async def test_a_name_at_fault_is_the_param_of_its_error(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path, "ALPHA")
    await load(client, "tenant", adapter)
    for name in ("tenant", "x" * 257):
        assert error_of(await load(client, name, adapter), 400)["param"] == "lora_name"
    assert error_of(await client.post(UNLOAD, json={"lora_name": ""}), 400)["param"] == "lora_name"


@pytest.mark.parametrize("name", ["x" * 257, "a\nb", "a\0b"])
async def test_a_name_is_short_and_printable(client: httpx.AsyncClient, name: str) -> None:
    error = error_of(await load(client, name, "/a"), 400)
    assert "at most 256 characters, all of them printable" in error["message"]


async def test_a_path_holds_no_nul(client: httpx.AsyncClient) -> None:
    assert "NUL" in error_of(await load(client, "a", "/a\0b"), 400)["message"]


async def test_without_lora_both_routes_say_how_to_enable_it() -> None:
    async with client_for(FakeEngine(fake_config(enable_lora=False))) as client:
        for response in (
            await load(client, "a", "/a"),
            await client.post(UNLOAD, json={"lora_name": "a"}),
        ):
            assert "--enable-lora" in error_of(response, 400)["message"]
