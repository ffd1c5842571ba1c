"""Who may do what, as one table: every route, with every kind of key, on every kind of server."""

from __future__ import annotations

import pytest
from fastapi.openapi.utils import get_openapi

from lora_serve.config import ServerConfig
from lora_serve.server.http.app import create_app
from tests.fakes.engine import FakeEngine
from tests.server.clients import client_for

OPEN = frozenset({"/health", "/ping", "/version", "/metrics"})
CHANGES = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/reset_prefix_cache"})
ANYWHERE = "0.0.0.0"

USER, OTHER, ADMIN, UNKNOWN, NONE = "user", "other", "admin", "unknown", ""
CALLERS = (USER, OTHER, ADMIN, UNKNOWN, NONE)
KEYS = {"api_key": (USER, OTHER)}
BOTH = {**KEYS, "admin_api_key": (ADMIN,)}
UPDATING = {"allow_runtime_lora_updating": True}

# Servers, and who may use each, and who may change it. A caller that may neither gets 401; one
# that may only use it, 403 with a key and 401 without.
SERVERS: dict[str, tuple[ServerConfig, tuple[str, ...], tuple[str, ...]]] = {
    "loopback": (ServerConfig(), CALLERS, CALLERS),
    "loopback, keys": (ServerConfig(**KEYS), (USER, OTHER), ()),
    "loopback, keys, updating": (ServerConfig(**KEYS, **UPDATING), (USER, OTHER), (USER, OTHER)),
    "loopback, both": (ServerConfig(**BOTH), (USER, OTHER, ADMIN), (ADMIN,)),
    "loopback, both, updating": (
        ServerConfig(**BOTH, **UPDATING),
        (USER, OTHER, ADMIN),
        (ADMIN,),
    ),
    "loopback, admin": (ServerConfig(admin_api_key=(ADMIN,)), CALLERS, (ADMIN,)),
    "network": (ServerConfig(host=ANYWHERE), CALLERS, ()),
    "network, updating": (ServerConfig(host=ANYWHERE, **UPDATING), CALLERS, CALLERS),
    "network, keys": (ServerConfig(host=ANYWHERE, **KEYS), (USER, OTHER), ()),
    "network, both": (ServerConfig(host=ANYWHERE, **BOTH), (USER, OTHER, ADMIN), (ADMIN,)),
    "network, admin": (ServerConfig(host=ANYWHERE, admin_api_key=(ADMIN,)), CALLERS, (ADMIN,)),
}


def routes(engine: FakeEngine) -> list[tuple[str, str]]:
    """(method, path) of everything that the application answers to, and one that it does not."""
    app = create_app(engine, ServerConfig())
    paths = get_openapi(title="as FastAPI finds them", version="0", routes=app.routes)["paths"]
    found = [
        (method.upper(), path.replace("{model_id}", "base/model"))
        for path, methods in paths.items()
        for method in methods
    ]
    return [*found, ("GET", "/openapi.json"), ("GET", "/docs"), ("GET", "/nothing")]


def expected(path: str, caller: str, config: ServerConfig, users: object, changers: object) -> int:
    """401 or 403, or 0 where the caller is let in."""
    if path in OPEN:
        return 0
    assert isinstance(users, tuple)
    assert isinstance(changers, tuple)
    if caller not in users:
        return 401
    if path not in CHANGES or caller in changers:
        return 0
    is_known = caller in (*config.api_key, *config.admin_api_key)
    return 403 if is_known else 401


@pytest.mark.parametrize("server", SERVERS)
async def test_every_route_lets_in_just_whom_the_table_says(
    engine: FakeEngine, server: str
) -> None:
    config, users, changers = SERVERS[server]
    table = routes(engine)
    assert {path for _, path in table} >= OPEN | CHANGES | {"/v1/completions", "/openapi.json"}
    async with client_for(engine, config) as client:
        for method, path in table:
            for caller in CALLERS:
                headers = {"Authorization": f"Bearer {caller}"} if caller else {}
                response = await client.request(method, path, json={}, headers=headers)
                refused = response.status_code if response.status_code in (401, 403) else 0
                wanted = expected(path, caller, config, users, changers)
                assert refused == wanted, f"{method} {path} as {caller or 'a client without a key'}"


async def test_an_empty_bearer_token_is_no_key(engine: FakeEngine) -> None:
    async with client_for(engine, ServerConfig(**BOTH)) as client:
        for header in ("Bearer", "Bearer ", "Bearer  "):
            response = await client.post("/reset_prefix_cache", headers={"Authorization": header})
            assert response.status_code == 401, header
