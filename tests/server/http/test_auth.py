from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from starlette.datastructures import Headers

from lora_serve.config import SchedulerConfig, ServerConfig
from lora_serve.errors import UnauthorizedError
from lora_serve.identity import tenant_salt
from lora_serve.server.http.auth import Caller, KeyRing
from tests.fakes.engine import FakeEngine, fake_config
from tests.server.clients import client_for, error_of

URL = "/v1/completions"
BODY = {"prompt": "hi", "max_tokens": 1}
KEYS = ServerConfig(api_key=("user", "other"), admin_api_key=("admin",))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def test_without_keys_a_loopback_server_lets_callers_do_everything(
    client: httpx.AsyncClient,
) -> None:
    assert (await client.post(URL, json=BODY)).status_code == 200
    assert (await client.post(URL, json=BODY, headers=bearer("any"))).status_code == 200
    assert (await client.post("/reset_prefix_cache")).status_code == 200


@pytest.mark.parametrize("key", ["user", "other", "admin"])
async def test_every_configured_key_lets_in(engine: FakeEngine, key: str) -> None:
    async with client_for(engine, KEYS) as client:
        assert (await client.post(URL, json=BODY, headers=bearer(key))).status_code == 200
        lower = {"authorization": f"bearer {key}"}
        assert (await client.post(URL, json=BODY, headers=lower)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [{}, bearer("wrong"), bearer(""), bearer("use"), {"Authorization": "Basic user"}],
)
@pytest.mark.parametrize(
    ("method", "url"),
    [
        ("POST", URL),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/base/model"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/load"),
        ("GET", "/openapi.json"),
        ("GET", "/nothing"),
    ],
)
async def test_any_other_key_is_a_401(
    engine: FakeEngine, method: str, url: str, headers: dict[str, str]
) -> None:
    async with client_for(engine, KEYS) as client:
        response = await client.request(method, url, json=BODY, headers=headers)
    assert error_of(response, 401)["type"] == "UnauthorizedError"
    assert response.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("url", ["/health", "/ping", "/version"])
async def test_probes_need_no_key(engine: FakeEngine, url: str) -> None:
    async with client_for(engine, KEYS) as client:
        assert (await client.get(url)).status_code == 200


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/nowhere"}),
        ("/v1/unload_lora_adapter", {"lora_name": "a"}),
        ("/reset_prefix_cache", {}),
    ],
)
async def test_only_an_admin_key_may_change_what_others_see(
    engine: FakeEngine, url: str, body: dict
) -> None:
    async with client_for(engine, KEYS) as client:
        error = error_of(await client.post(url, json=body, headers=bearer("user")), 403)
        assert error["type"] == "ForbiddenError"
        assert error["message"].endswith("that needs an admin API key"), "which there is"
        response = await client.post(url, json=body, headers=bearer("admin"))
        assert response.status_code in (200, 404)


async def test_with_admin_keys_alone_the_rest_stays_open(engine: FakeEngine) -> None:
    async with client_for(engine, ServerConfig(admin_api_key=("admin",))) as client:
        assert (await client.post(URL, json=BODY)).status_code == 200
        error_of(await client.post("/reset_prefix_cache"), 401)
        response = await client.post("/reset_prefix_cache", headers=bearer("admin"))
        assert response.status_code == 200


def test_a_key_that_is_both_is_an_admins() -> None:
    keys = KeyRing(ServerConfig(api_key=("k",), admin_api_key=("k",)))
    assert keys.identify(Headers({"Authorization": "Bearer k"})) == Caller("k", is_admin=True)


def test_a_key_need_not_be_ascii() -> None:
    keys = KeyRing(ServerConfig(api_key=("schlüssel",)))
    sent = "schlüssel".encode().decode("latin-1")  # as a server shows a header's bytes
    assert keys.identify(Headers({"Authorization": f"Bearer {sent}"})).api_key == "schlüssel"
    with pytest.raises(UnauthorizedError):
        keys.identify(Headers({"Authorization": "Bearer schlussel"}))


@pytest.mark.parametrize("choice", [None, True])
async def test_keys_have_salts_of_their_own(engine: FakeEngine, choice: bool | None) -> None:
    config = ServerConfig(api_key=("user", "other"), isolate_api_keys=choice)
    async with client_for(engine, config) as client:
        for key in ("user", "other", "user"):
            for body in (BODY, {**BODY, "cache_salt": "mine"}):
                await client.post(URL, json=body, headers=bearer(key))
    salts = [request.cache_salt for request in engine.seen]
    assert salts[:2] == salts[4:]
    assert len(set(salts)) == 4
    assert salts[1] == tenant_salt("user", "mine")


async def test_a_client_cannot_write_another_tenants_salt(engine: FakeEngine) -> None:
    config = ServerConfig(admin_api_key=("admin",), isolate_api_keys=True)
    async with client_for(engine, config) as client:
        await client.post(URL, json=BODY, headers=bearer("admin"))
        stolen = engine.seen[0].cache_salt
        await client.post(URL, json={**BODY, "cache_salt": stolen})
    assert engine.seen[1].cache_salt != stolen


async def test_one_key_never_finds_what_others_cached(engine: FakeEngine) -> None:
    prompt = {**BODY, "prompt": "a secret that is longer than a block of tokens"}
    async with client_for(engine, KEYS) as client:

        async def num_cached(key: str) -> int:
            answer = (await client.post(URL, json=prompt, headers=bearer(key))).json()
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert await num_cached("user") == 0
        assert await num_cached("other") == 0
        assert await num_cached("admin") == 0
        assert await num_cached("user") > 0


async def test_keys_that_come_with_a_reload_are_isolated_from_those_before(
    engine: FakeEngine, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    config = ServerConfig(api_key_file=str(path))
    salts = {}
    path.write_text("first\n")
    keys = KeyRing(config)
    salts["alone"] = keys.cache_salt(keys.identify(Headers({"Authorization": "Bearer first"})), "")
    path.write_text("first\nsecond\n")
    keys.reload()
    for key in ("first", "second"):
        salts[key] = keys.cache_salt(keys.identify(Headers({"Authorization": f"Bearer {key}"})), "")
    assert salts["first"] == salts["alone"] != salts["second"]


def test_the_log_says_who_shares_cached_kv() -> None:
    assert KeyRing(ServerConfig()).describe() == ""
    assert KeyRing(KEYS).describe() == (
        "API keys: 3; each finds its own cached KV alone (--no-isolate-api-keys shares it)"
    )
    shared = KeyRing(replace(KEYS, isolate_api_keys=False)).describe()
    assert "cached KV is shared" in shared


@pytest.mark.parametrize("url", [URL, "/v1/chat/completions"])
async def test_only_an_admin_key_overtakes_others_by_priority(url: str) -> None:
    scheduler = SchedulerConfig(scheduling_policy="priority")
    engine = FakeEngine(replace(fake_config(), scheduler=scheduler))
    body = {"max_tokens": 1, "priority": -1}
    body |= {"prompt": "hi"} if url == URL else {"messages": [{"role": "user", "content": "hi"}]}
    async with client_for(engine, KEYS) as client:
        error = error_of(await client.post(url, json=body, headers=bearer("user")), 400)
        assert error["param"] == "priority"
        assert error["message"].startswith("priority -1 is below --min-priority 0; ")
        for key, priority in (("admin", -1), ("user", 0), ("user", 5)):
            asked = {**body, "priority": priority}
            assert (await client.post(url, json=asked, headers=bearer(key))).status_code == 200
    async with client_for(engine, replace(KEYS, min_priority=-1)) as client:
        assert (await client.post(url, json=body, headers=bearer("user"))).status_code == 200
        below = {**body, "priority": -2}
        error_of(await client.post(url, json=below, headers=bearer("user")), 400)
    async with client_for(engine) as client:
        assert (await client.post(url, json=body)).status_code == 200


async def test_where_priority_orders_nothing_it_has_no_bound(engine: FakeEngine) -> None:
    async with client_for(engine, KEYS) as client:
        body = {**BODY, "priority": -1}
        assert (await client.post(URL, json=body, headers=bearer("user"))).status_code == 200


async def test_keys_that_are_not_isolated_share_what_they_salt_alike(engine: FakeEngine) -> None:
    async with client_for(engine, replace(KEYS, isolate_api_keys=False)) as client:
        for key in ("user", "other"):
            body = {**BODY, "cache_salt": "ours"}
            await client.post(URL, json=body, headers=bearer(key))
    assert [request.cache_salt for request in engine.seen] == ["ours", "ours"]


@pytest.mark.parametrize("sent", ["user", "Basic dXNlcjp4", "user user"])
async def test_a_key_in_another_form_is_told_the_form(engine: FakeEngine, sent: str) -> None:
    async with client_for(engine, KEYS) as client:
        refused = await client.post(URL, json=BODY, headers={"Authorization": sent})
    message = str(error_of(refused, 401)["message"])
    assert "`Bearer KEY`" in message
    assert sent not in message


async def test_a_list_of_adapters_paths_does_not_claim_to_change_the_server(
    engine: FakeEngine,
) -> None:
    async with client_for(engine, KEYS) as client:
        refused = await client.get("/v1/loras", headers=bearer("user"))
    message = str(error_of(refused, 403)["message"])
    assert message.startswith("this asks for adapters' paths, unlike /v1/models, and this API key")
