from __future__ import annotations

from itertools import product

import pytest

from lora_serve.config import ServerConfig
from lora_serve.config.server import is_loopback
from lora_serve.server.operation import Access
from lora_serve.server.routes import OPERATIONS
from tests.fakes.engine import FakeEngine
from tests.server.clients import client_for, error_of, serving
from tests.server.http.test_connections import answer_on, connect

RESET = "/reset_prefix_cache"
NAMED = ServerConfig(host="0.0.0.0", allowed_hosts=("llm.example", "10.0.0.1"))
NETWORK = ServerConfig(host="0.0.0.0")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.8.8", "::1"])
def test_loopback_hosts(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "localhost.evil.example", "", "1"])
def test_other_hosts(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    "host", ["localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST"]
)
async def test_a_loopback_server_answers_to_loopback_names(engine: FakeEngine, host: str) -> None:
    async with client_for(engine) as client:
        assert (await client.post(RESET, headers={"Host": host})).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example:8000", "10.0.0.1", "", "1"]
)
@pytest.mark.parametrize("url", [RESET, "/health", "/v1/models"])
async def test_a_name_that_points_here_is_refused_by_a_loopback_server(
    engine: FakeEngine, host: str, url: str
) -> None:
    async with client_for(engine) as client:
        method = "POST" if url == RESET else "GET"
        response = await client.request(method, url, headers={"Host": host})
    assert "--allowed-hosts" in str(error_of(response, 403)["message"])


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://localhost.evil", "//"])
async def test_a_page_from_elsewhere_may_not_change_a_loopback_server(
    engine: FakeEngine, origin: str
) -> None:
    headers = {"Origin": origin, "Content-Type": "text/plain"}  # what no-cors lets a page send
    async with client_for(engine) as client:
        response = await client.post(RESET, content=b"{}", headers=headers)
    assert origin in str(error_of(response, 403)["message"])


CHANGES = [(one.method, one.path) for one in OPERATIONS if one.access is Access.ADMIN]
OPEN_NETWORK = ServerConfig(host="0.0.0.0", allow_runtime_lora_updating=True)
WITH_KEY = ServerConfig(admin_api_key=("key",))


PAGES_OF_OTHER_PORTS = (
    ("localhost:8000", "http://localhost:3000"),
    ("localhost:8000", "http://localhost"),
    ("localhost:8000", "http://127.0.0.1:8000"),
    ("localhost:80", "https://localhost"),
)


@pytest.mark.parametrize("config", [ServerConfig(), OPEN_NETWORK, WITH_KEY])
async def test_a_page_of_another_port_may_change_nothing(
    engine: FakeEngine, config: ServerConfig
) -> None:
    async with client_for(engine, config) as client:
        for (method, path), (host, origin) in product(CHANGES, PAGES_OF_OTHER_PORTS):
            headers = {"Host": host, "Origin": origin, "Authorization": "Bearer key"}
            response = await client.request(method, path, json={}, headers=headers)
            message = error_of(response, 403)["message"]
            assert f"{origin!r} may not change this server" in message, path
            assert "--allowed-origins" in message


@pytest.mark.parametrize("origin", ["null", "", "http://", "http://[", "file://", "http://a:x"])
async def test_an_origin_without_an_address_is_no_servers_own(
    engine: FakeEngine, origin: str
) -> None:
    async with client_for(engine, OPEN_NETWORK) as client:
        response = await client.post(RESET, headers={"Host": "", "Origin": origin})
    assert "may not change" in str(error_of(response, 403)["message"])


@pytest.mark.parametrize(
    ("host", "origin", "allowed"),
    [
        ("localhost:8000", "http://localhost:8000", ()),
        ("LOCALHOST", "http://localhost", ()),
        ("localhost", "https://localhost:443", ()),
        ("localhost:443", "https://localhost", ()),
        ("[::1]:8000", "http://[::1]:8000", ()),
        ("localhost:8000", "http://localhost:3000", ("http://localhost:3000",)),
        ("localhost:8000", "http://localhost:3000", ("*",)),
        ("localhost:8000", None, ()),
    ],
)
async def test_own_pages_and_named_ones_and_other_clients_may_change_the_server(
    engine: FakeEngine, host: str, origin: str | None, allowed: tuple[str, ...]
) -> None:
    headers = {"Host": host} | ({"Origin": origin} if origin else {})
    async with client_for(engine, ServerConfig(allowed_origins=allowed)) as client:
        assert (await client.post(RESET, headers=headers)).status_code == 200


async def test_a_page_from_this_machine_may_ask(engine: FakeEngine) -> None:
    async with client_for(engine) as client:
        response = await client.get("/v1/models", headers={"Origin": "http://localhost:3000"})
    assert response.status_code == 200


async def test_allowed_hosts_name_who_is_answered_and_whose_pages_are(engine: FakeEngine) -> None:
    async with client_for(engine, NAMED) as client:
        for host, status in (("llm.example:80", 200), ("10.0.0.1", 200), ("localhost", 403)):
            response = await client.get("/health", headers={"Host": host})
            assert response.status_code == status, host
        for origin, status in (("https://LLM.example", 200), ("https://other.example", 403)):
            headers = {"Host": "llm.example", "Origin": origin}
            assert (await client.get("/health", headers=headers)).status_code == status, origin


async def test_a_server_on_the_network_answers_to_any_name(engine: FakeEngine) -> None:
    async with client_for(engine, NETWORK) as client:
        response = await client.get("/health", headers={"Host": "pod-3.example"})
    assert response.status_code == 200


async def test_a_server_on_a_unix_socket_answers_to_what_its_proxy_names(
    engine: FakeEngine,
) -> None:
    async with client_for(engine, ServerConfig(uds="/run/s")) as client:
        response = await client.get("/health", headers={"Host": "llm.example"})
    assert response.status_code == 200


async def test_no_redirect_names_the_host_that_a_client_sent(engine: FakeEngine) -> None:
    async with client_for(engine, NETWORK) as client:
        response = await client.post("/v1/completions/", headers={"Host": "evil.example"})
    assert response.status_code == 404
    assert "location" not in response.headers


@pytest.mark.parametrize(
    "hosts",
    [
        *([b"localhost", b"evil.example"], [b"evil.example", b"localhost"], [b"localhost"] * 2),
        *([b"[::1"], [b"user@localhost"], [b"localhost:8000:1"], [b"local host"], [b"localhost/"]),
        *([b"localhost, evil.example"], [b"localhost:x"], [b"\xe9"]),
    ],
)
@pytest.mark.parametrize("config", [ServerConfig(), NETWORK])
async def test_several_hosts_or_none_that_could_be_one_are_refused(
    engine: FakeEngine, hosts: list[bytes], config: ServerConfig
) -> None:
    async with serving(engine, config) as url:
        wire = await connect(url)
        lines = b"".join(b"Host: %b\r\n" % host for host in hosts)
        answer = await answer_on(wire, b"GET /health HTTP/1.1\r\n" + lines + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"Host header" in answer
        wire[1].close()


@pytest.mark.parametrize(
    "origin",
    [
        *("http://evil.example\\@localhost", "http://evil.example@localhost", "http://@localhost"),
        *("http://loc\talhost", "http:\t//localhost", "http://localhost\t", "\thttp://localhost"),
        *("http://localhost/", "http://localhost?x", "http://localhost#x", "http:///localhost"),
        *("//localhost", "localhost", "://localhost", "1http://localhost", "http://[::1"),
        *("http://localhost:", "http://localhost:x", "http://localhost:-1", "http://localhost:8:8"),
        *("http://localhost http://evil.example", "http://localhost, http://evil.example"),
    ],
)
async def test_an_origin_is_a_scheme_a_host_and_a_port_and_nothing_else(
    engine: FakeEngine, origin: str
) -> None:
    async with client_for(engine) as client:
        for url in ("/health", RESET):
            headers = {"Host": "localhost", "Origin": origin}
            response = await client.request("POST" if url == RESET else "GET", url, headers=headers)
            assert "may not use this server" in str(error_of(response, 403)["message"]), url
            assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    "origin", ["http://localhost:8000", "https://[::1]", "HTTP://LOCALHOST", "tauri://localhost"]
)
async def test_origins_of_this_machine_may_ask(engine: FakeEngine, origin: str) -> None:
    async with client_for(engine) as client:
        response = await client.get("/v1/models", headers={"Origin": origin})
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == origin


async def test_each_origin_is_judged(engine: FakeEngine) -> None:
    headers = [("Origin", "http://localhost"), ("Origin", "http://evil.example")]
    async with client_for(engine) as client:
        response = await client.post(RESET, headers=headers)
    assert "http://evil.example" in str(error_of(response, 403)["message"])


async def test_a_page_that_posts_without_cors_is_refused(engine: FakeEngine) -> None:
    body = b'{"prompt": "hi"}'
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nOrigin: https://evil.example\r\n"
        b"Sec-Fetch-Mode: no-cors\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n%b"
    ) % (len(body), body)
    async with serving(engine) as url:
        wire = await connect(url)
        assert (await answer_on(wire, request)).startswith(b"HTTP/1.1 403 ")
        wire[1].close()
    assert not engine.seen
