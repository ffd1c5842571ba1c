from __future__ import annotations

import httpx
import pytest

from lora_serve.config import ServerConfig
from lora_serve.errors import ConfigError
from tests.fakes.engine import FakeEngine
from tests.server.clients import client_for, error_of

URL = "/v1/completions"
PAGE = "http://page.example:3000"
LOCAL = "http://localhost:3000"
ALLOWED = "access-control-allow-origin"


async def preflight(client: httpx.AsyncClient, origin: str) -> httpx.Response:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "x-a"}
    return await client.options(URL, headers={"Origin": origin, **asked})


async def answer(client: httpx.AsyncClient, origin: str) -> httpx.Response:
    return await client.post(URL, json={"prompt": "hi"}, headers={"Origin": origin})


async def test_pages_of_this_machine_may_read_what_a_loopback_server_says(
    client: httpx.AsyncClient,
) -> None:
    response = await preflight(client, LOCAL)
    assert response.status_code == 200
    assert response.headers[ALLOWED] == LOCAL
    assert response.headers["access-control-allow-headers"].endswith("x-a")
    assert (await answer(client, LOCAL)).headers[ALLOWED] == LOCAL


async def test_other_pages_are_refused_there(client: httpx.AsyncClient) -> None:
    for response in (await preflight(client, PAGE), await answer(client, PAGE)):
        assert "--allowed-origins" in error_of(response, 403)["message"]
        assert ALLOWED not in response.headers


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_an_origin_that_is_named_may_send_and_read_and_no_other(
    engine: FakeEngine, host: str
) -> None:
    async with client_for(engine, ServerConfig(host=host, allowed_origins=(PAGE,))) as client:
        assert (await preflight(client, PAGE)).headers[ALLOWED] == PAGE
        assert (await answer(client, PAGE)).headers[ALLOWED] == PAGE
        for other in ("http://page.example", "https://page.example:3000", LOCAL):
            assert ALLOWED not in (await preflight(client, other)).headers


async def test_any_origin_may_be_allowed_in_vllms_words(engine: FakeEngine) -> None:
    async with client_for(engine, ServerConfig(allowed_origins=('["*"]',))) as client:
        assert (await preflight(client, PAGE)).headers[ALLOWED] == "*"
        assert (await answer(client, PAGE)).headers[ALLOWED] == "*"


async def test_a_server_on_the_network_lets_no_page_read_unless_told_to(
    engine: FakeEngine,
) -> None:
    async with client_for(engine, ServerConfig(host="0.0.0.0")) as client:
        assert ALLOWED not in (await preflight(client, PAGE)).headers
        assert ALLOWED not in (await answer(client, PAGE)).headers


async def test_a_preflight_needs_no_key_but_the_request_does(engine: FakeEngine) -> None:
    config = ServerConfig(api_key=("key",), allowed_origins=(PAGE,))
    async with client_for(engine, config) as client:
        assert (await preflight(client, PAGE)).status_code == 200
        refused = await answer(client, PAGE)
    error_of(refused, 401)
    assert refused.headers[ALLOWED] == PAGE, "the page is told why"


async def test_credentials_need_origins_by_name(engine: FakeEngine) -> None:
    config = ServerConfig(allowed_origins=(PAGE,), allow_credentials=True)
    async with client_for(engine, config) as client:
        headers = (await preflight(client, PAGE)).headers
    assert headers["access-control-allow-credentials"] == "true"
    for origins in ((), ("*",)):
        with pytest.raises(ConfigError, match="--allow-credentials needs --allowed-origins"):
            ServerConfig(allowed_origins=origins, allow_credentials=True)


@pytest.mark.parametrize("value", ["[", "[]", "[5]", "{}["[2:] + "x]"])
def test_a_list_that_is_none_is_a_clear_error(value: str) -> None:
    with pytest.raises(ConfigError, match=r"--allowed-methods .* must be a JSON list"):
        ServerConfig(allowed_methods=(value,))
