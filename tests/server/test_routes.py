from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx
import pytest
from fastapi.routing import APIRoute

from lora_serve.cli.environment import with_environment
from lora_serve.config import ServerConfig
from lora_serve.server.app import create_app
from lora_serve.server.http.drain import Drain
from lora_serve.server.http.errors import HTTP_TYPES, STATUS_AND_TYPE
from lora_serve.server.openapi_document import REASONS, openapi_document
from lora_serve.server.operation import Operation
from lora_serve.server.routes import OPERATIONS, STATE_PATHS
from tests.fakes.engine import FakeEngine
from tests.server.clients import client_for, known


def test_the_document_has_every_route_and_no_other() -> None:
    served = {
        (method.lower(), route.path_format)
        for route in known(create_app(FakeEngine(), ServerConfig()).routes)
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in route.methods - {"HEAD"}
    }
    assert {(operation.method, operation.path) for operation in OPERATIONS} == served


def test_every_status_that_an_error_has_is_explained() -> None:
    statuses = {status for status, _ in STATUS_AND_TYPE.values()} | set(HTTP_TYPES)
    assert statuses == set(REASONS)


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: f"{each.method} {each.path}")
async def test_every_status_that_it_sends_is_documented(
    operation: Operation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lora_serve.server.admin.metrics.PAGE_SECONDS", 0.0)
    statuses = [response.status_code async for response in wronged(operation)]
    assert set(statuses) <= {200, *operation.errors}
    assert {403, 405, 503} <= set(statuses) | ({503} if operation.path in STATE_PATHS else set())
    if operation.body is not None:
        assert {400, 401, 413} <= set(statuses)


async def wronged(operation: Operation) -> AsyncIterator[httpx.Response]:
    """The answers of servers that are well, that have keys, that end and that are broken."""
    path = operation.path.replace("{model}", "alias").replace("{lora_name}", "alias")
    sound = {} if operation.body is None else {"json": dict(operation.example)}

    async def ask(client: httpx.AsyncClient, **changes: object) -> httpx.Response:
        asked = {"method": operation.method, "url": path, **sound, **changes}
        return await client.request(**asked)

    engine = FakeEngine()
    async with client_for(
        engine, ServerConfig(max_body_bytes=999, max_lora_body_bytes=999)
    ) as client:
        yield await ask(client)
        yield await ask(client, headers={"Host": "elsewhere"})
        yield await ask(client, method="patch")
        yield await ask(client, url=operation.path)
        for wrong in ("nobody", "", 7, "a" * 9999):
            for name in ("model", "lora_name", "colour"):
                body = {**operation.example, name: wrong}
                yield await ask(client, **({"json": body} if sound else {}))
        engine.error = ZeroDivisionError("a bug")
        yield await ask(client)
        engine.is_alive = False
        yield await ask(client)
    keys, drain = ServerConfig(api_key=("user",), admin_api_key=("admin",)), Drain()
    app = create_app(FakeEngine(), keys, drain)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for key in ("", "user", "admin"):
            yield await ask(client, headers={"Authorization": f"Bearer {key}"})
        drain.begin()
        yield await ask(client, headers={"Authorization": "Bearer admin"})


@pytest.mark.parametrize(
    ("config", "may_go_without"),
    [
        (ServerConfig(), True),
        (ServerConfig(admin_api_key=("admin",)), True),
        (ServerConfig(admin_api_key_file="admins"), True),
        (ServerConfig(api_key=("user",)), False),
        (ServerConfig(api_key_file="users"), False),
        (with_environment(ServerConfig(), {"LORA_SERVE_API_KEY": "user"}), False),
    ],
    ids=["none", "admin", "admin file", "key", "key file", "environment"],
)
def test_it_says_whether_a_key_is_needed(config: ServerConfig, may_go_without: bool) -> None:
    assert ({} in openapi_document(config)["security"]) is may_go_without


async def test_it_is_served_whole_with_no_reference_into_nothing(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    for reference in json.dumps(document).split('"$ref": "#/components/schemas/')[1:]:
        assert reference.partition('"')[0] in schemas
    body = schemas["CompletionBody"]
    assert body["additionalProperties"] is False
    assert {"type": "string"} in body["properties"]["prompt"]["anyOf"]
    assert (await client.get("/docs")).status_code == 200
