"""The OpenAPI document, made of the table of routes.

Bodies are described by the models that read them, answers by the structs that are sent, so neither
can say something else than the code does.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

from lora_serve import __version__
from lora_serve.config import ServerConfig
from lora_serve.server.http.auth import KEY_HEADER
from lora_serve.server.operation import Access, Operation
from lora_serve.server.routes import OPERATIONS

Schema = dict[str, Any]  # JSON

REASONS = {
    400: "Something in the request is wrong; the message names it, the limit and what to do.",
    401: "No API key, or an unknown one.",
    403: "The API key may not do that, or the Host or Origin is none that this server answers to.",
    404: "No such model, adapter, response or route.",
    405: "The path has no such method; Allow names those that it has.",
    408: "The request was not sent in time, or its answer not read in time.",
    409: "Another caller has ended what this one asked for.",
    413: "The body is larger than --max-body-bytes.",
    431: "The request's head is too large.",
    500: "A bug, or a request that kills engines.",
    503: "Too much is queued, or the engine or the server is not there; retry later.",
}


class DocumentRoute:
    """Answers with the document, which is made when it is first asked for: few ever do."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._text = b""

    async def answer(self, _: Request) -> Response:
        return Response(await asyncio.to_thread(self._made_once), media_type="application/json")

    def _made_once(self) -> bytes:
        with self._lock:
            if not self._text:
                self._text = msgspec.json.encode(openapi_document(self._config))
            return self._text


def openapi_document(config: ServerConfig) -> Schema:
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "lora-serve", "version": __version__},
        "servers": [{"url": config.root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": _schemas(config.ignore_unknown_fields),
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "plain_key": {"type": "apiKey", "in": "header", "name": KEY_HEADER},
            },
        },
        "security": [{"key": []}, {"plain_key": []}, *([] if config.requires_api_key else [{}])],
    }


def _described(operation: Operation) -> Schema:
    described: Schema = {
        "summary": operation.summary,
        "operationId": f"{operation.method}_{operation.path.strip('/').replace('/', '_')}",
        "parameters": list(_parameters(operation)),
        "responses": {"200": _success(operation)},
    }
    if operation.body is not None:
        described["requestBody"] = {
            "required": operation.needs_body,
            "content": {
                "application/json": {
                    "schema": _reference(operation.body),
                    "example": dict(operation.example),
                }
            },
        }
    for status in sorted(operation.errors):
        content = {"application/json": {"schema": _reference(operation.error)}}
        described["responses"][str(status)] = {"description": REASONS[status], "content": content}
    if operation.access is Access.OPEN:
        described["security"] = []
    return described


def _parameters(operation: Operation) -> Iterator[Schema]:
    for name in re.findall(r"{(\w+)}", operation.path):
        schema = {"type": "string", "minLength": 1}
        yield {"name": name, "in": "path", "required": True, "schema": schema}
    for parameter in operation.in_query:
        schema = {"type": "string"} | ({"enum": parameter.values} if parameter.values else {})
        yield {"name": parameter.name, "in": "query", "required": False, "schema": schema}


def _success(operation: Operation) -> Schema:
    success: Schema = {"description": "Success."}
    if isinstance(operation.answer, str):
        success["content"] = {operation.answer: {"schema": {"type": "string"}}}
        if operation.or_json is not None:
            success["content"]["application/json"] = {"schema": _reference(operation.or_json)}
    elif operation.answer is not None:
        structs = _structs(operation)
        schema = _reference(structs[0])
        if len(structs) > 1:
            schema = {"anyOf": [_reference(struct) for struct in structs]}
        if operation.is_list:
            schema = {"type": "array", "items": schema}
        if operation.or_list:
            schema = {"anyOf": [schema, {"type": "array", "items": schema}]}
        success["content"] = {"application/json": {"schema": schema}}
    if operation.streams:
        # No type: some readers take the schema for all of the text, and others for each event.
        events = {"description": "Server-sent events, whose data is JSON."}
        success["content"]["text/event-stream"] = {"schema": events}
    return success


@cache  # a fifth of a second, and the same for all servers of a process
def _schemas(ignores_unknown_fields: bool) -> Schema:
    return _bodies(ignores_unknown_fields) | _answers()


def _bodies(ignores_unknown_fields: bool) -> Schema:
    bodies = [operation.body for operation in OPERATIONS if operation.body is not None]
    _, schema = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    schemas: Schema = schema["$defs"]
    if not ignores_unknown_fields:
        for body in schemas.values():
            if "properties" in body:
                body["additionalProperties"] = False
    return schemas


def _answers() -> Schema:
    structs = [struct for operation in OPERATIONS for struct in _structs(operation)]
    errors = {op.error for op in OPERATIONS}
    _, schemas = msgspec.json.schema_components(
        [*structs, *errors], ref_template="#/components/schemas/{name}"
    )
    return dict(schemas)


def _structs(operation: Operation) -> tuple[type[msgspec.Struct], ...]:
    """What an answer may be, if it is JSON."""
    if isinstance(operation.answer, tuple):
        return operation.answer
    if operation.or_json is not None:
        return (operation.or_json,)
    return (operation.answer,) if isinstance(operation.answer, type) else ()


def _reference(described: type) -> Schema:
    return {"$ref": f"#/components/schemas/{described.__name__}"}
