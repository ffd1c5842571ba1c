from __future__ import annotations

import json

import httpx
from fastapi.openapi.utils import get_openapi

from lora_serve.config import ServerConfig
from lora_serve.server.http.app import create_app
from lora_serve.server.http.errors import HTTP_TYPES, STATUS_AND_TYPE
from lora_serve.server.openapi import OPERATIONS, REASONS
from tests.fakes.engine import FakeEngine


def test_the_document_has_every_route_and_no_other() -> None:
    app = create_app(FakeEngine(), ServerConfig())
    paths = get_openapi(title="as FastAPI finds them", version="0", routes=app.routes)["paths"]
    served = {(method, path) for path, methods in paths.items() for method in methods}
    assert {(operation.method, operation.path) for operation in OPERATIONS} == served


def test_every_status_that_an_error_has_is_explained() -> None:
    assert {status for status, _ in STATUS_AND_TYPE.values()} == set(REASONS)
    assert set(HTTP_TYPES) - {405} <= set(REASONS)


async def test_it_is_served_whole_with_no_reference_into_nothing(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    for reference in json.dumps(document).split('"$ref": "#/components/schemas/')[1:]:
        assert reference.partition('"')[0] in schemas
    body = schemas["CompletionBody"]
    assert body["additionalProperties"] is False
    assert {"type": "string"} in body["properties"]["prompt"]["anyOf"]
    assert (await client.get("/docs")).status_code == 200
