"""The one table of routes: who may use each, what it takes, and every status it may answer with.

The OpenAPI document is made of it, in the order of a reader's interest. Bodies are described by the
models that read them, answers by the structs that are sent, so neither can say something else than
the code does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
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
from lora_serve.server.http.probes import LIVE_PATHS, READY_PATHS
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
    TokenizerInfo,
)

Schema = dict[str, Any]  # JSON

PLAIN_TEXT = "text/plain"
REASONS = {
    400: "Something in the request is wrong; the message names it, the limit and what to do.",
    401: "No API key, or an unknown one.",
    403: "The API key may not do that, or the Host or Origin is none that this server answers to.",
    404: "No such model, adapter or route.",
    405: "The path has no such method; Allow names those that it has.",
    408: "The request was not sent in time, or its answer not read in time.",
    413: "The body is larger than --max-body-bytes.",
    431: "The request's head is too large.",
    500: "A bug, or a request that kills engines.",
    503: "Too much is queued, or the engine or the server is not there; retry later.",
}
ANY_ROUTE = (403, 405, 408, 431, 500, 503)


class ErrorDetail(msgspec.Struct, frozen=True):
    """param: the field at fault. code: the status."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorAnswer(msgspec.Struct, frozen=True):
    """The body of every status above 399."""

    error: ErrorDetail


class Access(Enum):
    """Who may use a route. It says so; `http/auth.py` and the route's handler see to it."""

    OPEN = "every client: it says nothing of tenants"
    KEY = "callers with an API key, where there are keys"
    OPERATOR = "callers who run the server, where there are keys"
    ADMIN = "callers who may change the server for others"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One route with one method.

    answer: a struct, a media type, or None for an empty body. example: a body that is answered
    with 200 where it names what is there. generates: counted as a generation while it is answered.
    streams: events, if asked for. names_model: the caller names a model or an adapter.
    """

    method: str
    path: str
    summary: str
    access: Access
    answer: type[msgspec.Struct] | str | None
    body: type[BaseModel] | None = None
    example: Mapping[str, object] = field(default_factory=dict)
    needs_body: bool = True
    generates: bool = False
    streams: bool = False
    names_model: bool = False
    in_query: tuple[str, ...] = ()

    @property
    def errors(self) -> frozenset[int]:
        """Every status besides 200 with which it may answer."""
        statuses = set(ANY_ROUTE)
        if self.access is not Access.OPEN:
            statuses.add(401)
        if self.body is not None:
            statuses |= {400, 413}
        if self.names_model:
            statuses.add(404)
        return frozenset(statuses)


OPERATIONS = (
    Operation(
        method="post",
        path="/v1/completions",
        summary="Continue prompts",
        access=Access.KEY,
        answer=Completion,
        body=CompletionBody,
        example={"prompt": "Once upon a time", "max_tokens": 16},
        generates=True,
        streams=True,
        names_model=True,
    ),
    Operation(
        method="post",
        path="/v1/chat/completions",
        summary="Continue a conversation",
        access=Access.KEY,
        answer=ChatCompletion,
        body=ChatBody,
        example={"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 16},
        generates=True,
        streams=True,
        names_model=True,
    ),
    Operation(
        method="get",
        path="/v1/models",
        summary="The model and its adapters",
        access=Access.KEY,
        answer=ModelList,
    ),
    Operation(
        method="get",
        path="/v1/models/{model}",
        summary="One of them",
        access=Access.KEY,
        answer=ModelCard,
        names_model=True,
    ),
    Operation(
        method="post",
        path="/v1/load_lora_adapter",
        summary="Load or replace an adapter",
        access=Access.ADMIN,
        answer=PLAIN_TEXT,
        body=LoadAdapterBody,
        example={"lora_name": "tenant-a", "lora_path": "/adapters/a"},
        names_model=True,
    ),
    Operation(
        method="post",
        path="/v1/unload_lora_adapter",
        summary="Take an adapter away",
        access=Access.ADMIN,
        answer=PLAIN_TEXT,
        body=UnloadAdapterBody,
        example={"lora_name": "tenant-a"},
        names_model=True,
    ),
    Operation(
        method="post",
        path="/reset_prefix_cache",
        summary="Forget cached KV",
        access=Access.ADMIN,
        answer=Success,
        body=ResetPrefixCacheBody,
        example={"lora_name": "tenant-a"},
        needs_body=False,
        names_model=True,
        in_query=("lora_name",),
    ),
    Operation(
        method="post",
        path="/tokenize",
        summary="From text to tokens",
        access=Access.KEY,
        answer=Tokenized,
        body=TokenizeBody,
        example={"prompt": "Hello"},
        names_model=True,
    ),
    Operation(
        method="post",
        path="/detokenize",
        summary="From tokens to text",
        access=Access.KEY,
        answer=Detokenized,
        body=DetokenizeBody,
        example={"tokens": [1, 2, 3]},
        names_model=True,
    ),
    Operation(
        method="get",
        path="/tokenizer_info",
        summary="The tokenizer's special tokens and the chat template",
        access=Access.KEY,
        answer=TokenizerInfo,
        names_model=True,
    ),
    *(
        Operation(method="get", path=path, summary=summary, access=Access.OPEN, answer=None)
        for paths, summary in (
            (READY_PATHS, "Whether requests are being answered"),
            (LIVE_PATHS, "Whether the server runs"),
        )
        for path in paths
    ),
    Operation(method="post", path="/ping", summary="The same", access=Access.OPEN, answer=None),
    Operation(
        method="get",
        path="/load",
        summary="How many generations are in state",
        access=Access.KEY,
        answer=Load,
    ),
    Operation(
        method="get",
        path="/version",
        summary="Of this server",
        access=Access.OPEN,
        answer=Version,
    ),
    Operation(
        method="get",
        path="/metrics",
        summary="For Prometheus",
        access=Access.OPERATOR,
        answer=PLAIN_TEXT,
    ),
)


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
            "schemas": _bodies(config) | _answers(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}] if config.requires_api_key else [{"key": []}, {}],
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
        content = {"application/json": {"schema": _reference(ErrorAnswer)}}
        described["responses"][str(status)] = {"description": REASONS[status], "content": content}
    if operation.access is Access.OPEN:
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
