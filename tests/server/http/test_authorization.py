"""Who may do what, as one table: every route, with every kind of key, on every kind of server."""

from __future__ import annotations

import pytest

from lora_serve.config import ServerConfig
from lora_serve.server.app import create_app
from lora_serve.server.operation import Access
from lora_serve.server.routes import OPERATIONS
from tests.fakes.engine import FakeEngine
from tests.server.clients import client_for, known


def paths_for(access: Access) -> frozenset[str]:
    return frozenset(operation.path for operation in OPERATIONS if operation.access is access)


OPEN = paths_for(Access.OPEN)
OPERATES = paths_for(Access.OPERATOR)  # needs an admin key where there is one
DOCUMENT = "/openapi.json"
USES = paths_for(Access.KEY) | {DOCUMENT}
CHANGES = paths_for(Access.ADMIN)
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
    "uds": (ServerConfig(uds="/run/s"), CALLERS, ()),
    "uds, updating": (ServerConfig(uds="/run/s", **UPDATING), CALLERS, CALLERS),
    "network": (ServerConfig(host=ANYWHERE), CALLERS, ()),
    "network, updating": (ServerConfig(host=ANYWHERE, **UPDATING), CALLERS, CALLERS),
    "network, keys": (ServerConfig(host=ANYWHERE, **KEYS), (USER, OTHER), ()),
    "network, both": (ServerConfig(host=ANYWHERE, **BOTH), (USER, OTHER, ADMIN), (ADMIN,)),
    "network, admin": (ServerConfig(host=ANYWHERE, admin_api_key=(ADMIN,)), CALLERS, (ADMIN,)),
}


def routes(engine: FakeEngine) -> list[tuple[str, str]]:
    """(method, path) of everything that the application answers to, shown to clients or not."""
    return [
        (method, route.path.replace(":path}", "}"))
        for route in known(create_app(engine, ServerConfig()).routes)
        for method in sorted(route.methods or ())
    ]


def test_every_route_has_its_place_in_the_table(engine: FakeEngine) -> None:
    """A route that is in no row of the table of operations fails here."""
    assert {path for _, path in routes(engine)} == OPEN | OPERATES | USES | CHANGES
    assert len(OPEN) + len(OPERATES) + len(USES) + len(CHANGES) == len(
        OPEN | OPERATES | USES | CHANGES
    )


def expected(
    path: str,
    caller: str,
    config: ServerConfig,
    users: tuple[str, ...],
    changers: tuple[str, ...],
) -> int:
    """401 or 403, or 0 where the caller is let in."""
    if path in OPEN:
        return 0
    if caller not in users:
        return 401
    is_admins = path in CHANGES or (path in OPERATES and config.admin_api_key)
    if not is_admins or caller in changers:
        return 0
    is_known = caller in (*config.api_key, *config.admin_api_key)
    return 403 if is_known else 401


# What these allow is what others allow, in another combination.
ALLOWING_AS_OTHERS = {"loopback, both, updating", "loopback, admin", "uds", "uds, updating"}


@pytest.mark.parametrize(
    "server",
    [
        pytest.param(name, marks=pytest.mark.slow if name in ALLOWING_AS_OTHERS else ())
        for name in SERVERS
    ],
)
async def test_every_route_lets_in_just_whom_the_table_says(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, server: str
) -> None:
    monkeypatch.setattr("lora_serve.server.admin.metrics.PAGE_SECONDS", 0.0)
    config, users, changers = SERVERS[server]
    table = [*routes(engine), ("GET", "/nothing")]
    async with client_for(engine, config) as client:
        for method, path in table:
            for caller in CALLERS:
                headers = {"Authorization": f"Bearer {caller}"} if caller else {}
                url = path.replace("{model}", "base/model").replace("{lora_name}", "a")
                response = await client.request(method, url, json={}, headers=headers)
                refused = response.status_code if response.status_code in (401, 403) else 0
                wanted = expected(path, caller, config, users, changers)
                assert refused == wanted, f"{method} {path} as {caller or 'a client without a key'}"


async def test_an_empty_bearer_token_is_no_key(engine: FakeEngine) -> None:
    async with client_for(engine, ServerConfig(**BOTH)) as client:
        for header in ("Bearer", "Bearer ", "Bearer  "):
            response = await client.post("/reset_prefix_cache", headers={"Authorization": header})
            assert response.status_code == 401, header
