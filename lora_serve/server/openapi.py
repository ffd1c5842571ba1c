"""The OpenAPI document: what each route takes, and every status with which it may answer.

One table, in the order of a reader's interest. Bodies are described by the models that read them,
answers by the structs that are sent, so neither can say something else than the code does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from lora_serve import __version__
from lora_serve.config import ServerConfig
from lora_serve.server.admin.protocol import (
    LoadAdapterBody,
    ResetPrefixCacheBody,
    UnloadAdapterBody,
)
from lora_serve.server.admin.responses import Load, Success, Version
from lora_serve.server.openai.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from lora_serve.server.openai.responses import (
    ChatCompletion,
    Completion,
    Detokenized,
    ModelCard,
    ModelList,
    Tokenized,
)

Schema = dict[str, Any]  # JSON

PLAIN_TEXT = "text/plain"
REASONS = {
    400: "Something in the request is wrong; the message names it, the limit and what to do.",
    401: "No API key, or an unknown one.",
    403: "The API key may not do that.",
    404: "No such model, adapter or route.",
    408: "The request was not sent in time, or its answer not read in time.",
    413: "The body is larger than --max-body-bytes.",
    431: "The request's head is too large.",
    500: "A bug, or a request that kills engines.",
    503: "Too much is queued, or the engine or the server is not there; retry later.",
}
ANY_ROUTE = (408, 431, 500, 503)


class ErrorDetail(msgspec.Struct, frozen=True):
    """param: the field at fault. code: the status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorAnswer(msgspec.Struct, frozen=True):
    """The body of every status above 399."""

    error: ErrorDetail


@dataclass(frozen=True, slots=True)
class Operation:
    """answer: a struct, a media type, or None for an empty body. streams: events, if asked for."""

    method: str
    path: str
    summary: str
    answer: type[msgspec.Struct] | str | None
    body: type[BaseModel] | None = None
    needs_body: bool = True
    streams: bool = False
    errors: tuple[int, ...] = (401,)
    in_query: tuple[str, ...] = ()


_WITH_BODY = (400, 401, 404, 413)
_AS_ADMIN = (*_WITH_BODY, 403)

OPERATIONS = (
    Operation(
        *("post", "/v1/completions", "Continue prompts", Completion, CompletionBody),
        errors=_WITH_BODY,
        streams=True,
    ),
    Operation(
        *("post", "/v1/chat/completions", "Continue a conversation", ChatCompletion, ChatBody),
        errors=_WITH_BODY,
        streams=True,
    ),
    Operation("get", "/v1/models", "The model and its adapters", ModelList),
    Operation("get", "/v1/models/{model}", "One of them", ModelCard, errors=(401, 404)),
    Operation(
        *("post", "/v1/load_lora_adapter", "Load or replace an adapter", PLAIN_TEXT),
        body=LoadAdapterBody,
        errors=_AS_ADMIN,
    ),
    Operation(
        *("post", "/v1/unload_lora_adapter", "Take an adapter away", PLAIN_TEXT),
        body=UnloadAdapterBody,
        errors=_AS_ADMIN,
    ),
    Operation(
        *("post", "/reset_prefix_cache", "Forget cached KV", Success, ResetPrefixCacheBody),
        needs_body=False,
        errors=_AS_ADMIN,
        in_query=("lora_name",),
    ),
    Operation(
        *("post", "/tokenize", "From text to tokens", Tokenized, TokenizeBody), errors=_WITH_BODY
    ),
    Operation(
        *("post", "/detokenize", "From tokens to text", Detokenized, DetokenizeBody),
        errors=_WITH_BODY,
    ),
    Operation("get", "/health", "Whether requests are being answered", None, errors=()),
    Operation("get", "/ping", "The same", None, errors=()),
    Operation("post", "/ping", "The same", None, errors=()),
    Operation("get", "/load", "How many generations are in state", Load),
    Operation("get", "/version", "Of this server", Version, errors=()),
    Operation("get", "/metrics", "For Prometheus", PLAIN_TEXT, errors=(401, 403)),
)


def openapi_document(config: ServerConfig) -> Schema:
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _described(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "lora-serve", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": _bodies(config) | _answers(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}] if not config.api_key else [{"key": []}],
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
            "content": {"application/json": {"schema": _reference(operation.body)}},
        }
    for status in sorted({*operation.errors, *ANY_ROUTE}):
        content = {"application/json": {"schema": _reference(ErrorAnswer)}}
        described["responses"][str(status)] = {"description": REASONS[status], "content": content}
    if not operation.errors:
        described["security"] = []
    return described


def _parameters(operation: Operation) -> Iterator[Schema]:
    if "{model}" in operation.path:
        schema = {"type": "string", "minLength": 1}
        yield {"name": "model", "in": "path", "required": True, "schema": schema}
    for name in operation.in_query:
        yield {"name": name, "in": "query", "required": False, "schema": {"type": "string"}}


def _success(operation: Operation) -> Schema:
    success: Schema = {"description": "Success."}
    if isinstance(operation.answer, str):
        success["content"] = {operation.answer: {"schema": {"type": "string"}}}
    elif operation.answer is not None:
        success["content"] = {"application/json": {"schema": _reference(operation.answer)}}
    if operation.streams:
        success["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return success


def _bodies(config: ServerConfig) -> Schema:
    bodies = [operation.body for operation in OPERATIONS if operation.body is not None]
    _, schema = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    schemas: Schema = schema["$defs"]
    if not config.ignore_unknown_fields:
        for body in schemas.values():
            body["additionalProperties"] = False
    return schemas


def _answers() -> Schema:
    structs = [op.answer for op in OPERATIONS if isinstance(op.answer, type)]
    _, schemas = msgspec.json.schema_components(
        [*structs, ErrorAnswer], ref_template="#/components/schemas/{name}"
    )
    return dict(schemas)


def _reference(described: type) -> Schema:
    return {"$ref": f"#/components/schemas/{described.__name__}"}
