from __future__ import annotations

import asyncio
import socket
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from lora_serve.config import ServerConfig
from lora_serve.errors import ConfigError
from lora_serve.server.admin import metrics
from lora_serve.server.admin.metrics import MetricsPage, metrics_app
from lora_serve.server.app import run_server
from lora_serve.server.http.hosts import AllowedHosts
from lora_serve.server.http.listener import open_listeners
from tests.fakes.engine import FakeEngine, write_adapter
from tests.server.clients import client_for, error_of, eventually

BOTH = ServerConfig(api_key=("user", "other"), admin_api_key=("admin",))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


async def test_metrics_are_those_of_the_moment(
    engine: FakeEngine, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    await engine.load_lora_adapter("tenant", write_adapter(tmp_path, "ALPHA"))
    engine.growing.add("a request")
    await client.post("/v1/completions", json={"prompt": "hi"})
    await client.post("/v1/completions", json={"promt": "hi"})
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert 'vllm:num_requests_running{engine="0",model_name="base/model"} 1.0' in response.text
    assert 'lora_name="tenant"' in response.text
    count = 'http_requests_total{handler="/v1/completions",method="POST",status="%d"} 1.0'
    assert count % 200 in response.text
    assert count % 400 in response.text


async def test_metrics_outlive_the_engine(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.is_alive = False
    response = await client.get("/metrics")
    assert response.status_code == 200
    stale = 'lora_serve:stale_scrapes_total{engine="0",model_name="base/model"} 1.0'
    assert stale in response.text


@pytest.mark.parametrize(
    ("config", "statuses"),
    [
        (ServerConfig(), {"": 200, "any": 200}),
        (ServerConfig(host="0.0.0.0"), {"": 200}),
        (ServerConfig(api_key=("user",)), {"": 401, "any": 401, "user": 200}),
        (ServerConfig(admin_api_key=("admin",)), {"": 401, "admin": 200}),
        (BOTH, {"": 401, "user": 403, "other": 403, "admin": 200}),
        (replace(BOTH, metrics_need_key=False), {"": 200, "any": 200, "user": 200}),
        (replace(BOTH, metrics_port=0), {"": 401, "user": 404, "admin": 404}),
        (replace(BOTH, metrics_port=0, metrics_need_key=False), {"": 404}),
    ],
)
async def test_adapters_are_named_to_those_who_run_the_server(
    engine: FakeEngine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: ServerConfig,
    statuses: dict[str, int],
) -> None:
    monkeypatch.setattr(metrics, "PAGE_SECONDS", 0.0)
    await engine.load_lora_adapter("tenant", write_adapter(tmp_path, "ALPHA"))
    async with client_for(engine, config) as client:
        for key, status in statuses.items():
            for method in ("GET", "HEAD"):
                response = await client.request(method, "/metrics", headers=bearer(key))
                assert response.status_code == status, (key, method)
                shown = status == 200 and method == "GET"
                assert ("tenant" in response.text) == shown
                if status == 404 and method == "GET":
                    assert "on this port; --metrics-port 0 gives it one" in response.text


async def test_the_metrics_port_needs_no_key_and_serves_nothing_else(
    engine: FakeEngine, tmp_path: Path
) -> None:
    await engine.load_lora_adapter("tenant", write_adapter(tmp_path, "ALPHA"))
    app = metrics_app(MetricsPage(engine), AllowedHosts(ServerConfig(), "127.0.0.1"))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert "tenant" in (await client.get("/metrics")).text
        for path in ("/v1/models", "/health", "/docs", "/openapi.json", "/v1/completions"):
            error_of(await client.get(path), 404)
        rebound = await client.get("/metrics", headers={"Host": "evil.example"})
        assert error_of(rebound, 403)["type"] == "ForbiddenError"


async def test_a_server_with_a_metrics_port_listens_on_both_until_it_ends(
    engine: FakeEngine,
) -> None:
    config = replace(BOTH, port=0, metrics_port=0)
    listeners = open_listeners(config)
    assert listeners.metrics is not None
    api, page = (
        f"http://127.0.0.1:{s.getsockname()[1]}" for s in (listeners.api, listeners.metrics)
    )
    server = asyncio.create_task(run_server(engine, config, listeners))
    async with httpx.AsyncClient() as client:

        async def status(url: str) -> int:
            try:
                return (await client.get(url)).status_code
            except httpx.ConnectError:
                return 0

        async with asyncio.timeout(10):
            while not await status(f"{api}/health"):
                await asyncio.sleep(0.01)
        assert await status(f"{page}/metrics") == 200
        assert await status(f"{api}/metrics") == 401
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)
        assert await status(f"{page}/metrics") == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::"])
def test_the_servers_own_port_is_refused_for_metrics_by_name(host: str) -> None:
    with pytest.raises(ConfigError, match="--metrics-port 8000 is the --port of the server itself"):
        ServerConfig(host=host, metrics_port=8000)
    assert ServerConfig(host="10.0.0.1", metrics_port=8000).metrics_port == 8000
    assert ServerConfig(host=host, uds="/run/s", metrics_port=8000).uds


def test_a_taken_metrics_port_is_a_clear_error() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Exception, match=f"--metrics-host 127.0.0.1 --metrics-port {port}: "):
            open_listeners(ServerConfig(port=0, metrics_port=port))


async def test_a_page_that_was_made_fast_is_soon_followed_by_the_next(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "PAGE_SECONDS", 3600.0)
    async with client_for(engine) as client:
        for _ in range(3):
            assert (await client.get("/metrics")).status_code == 200


async def test_all_who_ask_meanwhile_share_a_page_that_is_new(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "PAGE_SECONDS", 0.3)
    monkeypatch.setattr(metrics, "PAUSE_SHARE", 1e9)
    num_pages = 0
    render = engine.metrics.render

    def counted() -> bytes:
        nonlocal num_pages
        num_pages += 1
        return render()

    engine.metrics.render = counted  # type: ignore[method-assign]
    async with client_for(engine) as client:
        begin = asyncio.get_running_loop().time()
        first = await client.get("/metrics")
        await client.post("/v1/completions", json={"prompt": "hi"})
        others = await asyncio.gather(*(client.get("/metrics") for _ in range(50)))
        assert asyncio.get_running_loop().time() - begin >= 0.3
    assert num_pages == 2
    assert {other.text for other in others} == {others[0].text}
    answered = 'handler="/v1/completions",method="POST",status="200"} 1.0'
    assert answered in others[0].text
    assert answered not in first.text


async def test_one_scraper_that_leaves_takes_no_page_from_others(engine: FakeEngine) -> None:
    page = MetricsPage(engine)
    await page.text()
    leaving, staying = asyncio.create_task(page.text()), asyncio.create_task(page.text())
    await asyncio.sleep(0.01)
    leaving.cancel()
    assert b"vllm:num_requests_running" in await staying
    await eventually(leaving.done)


async def test_a_page_that_fails_is_followed_by_one_that_does_not(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "PAGE_SECONDS", 0.0)
    render, faults = engine.metrics.render, [RuntimeError("a bug")]

    def faulty() -> bytes:
        if faults:
            raise faults.pop()
        return render()

    engine.metrics.render = faulty  # type: ignore[method-assign]
    async with client_for(engine) as client:
        error_of(await client.get("/metrics"), 500)
        assert (await client.get("/metrics")).status_code == 200
