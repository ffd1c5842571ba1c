"""What the table of routes says of one route: who may use it, what it takes, and its answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import msgspec
from pydantic import BaseModel

from lora_serve.server.http.error_answers import ErrorAnswer

PLAIN_TEXT = "text/plain"
ANY_ROUTE = (403, 405, 408, 431, 500, 503)


class Access(Enum):
    """Who may use a route.

    The middleware lets in who may use it; an ADMIN route's handler asks `KeyRing.require_admin`.
    """

    OPEN = "every client: it says nothing of tenants"
    KEY = "callers with an API key, where there are keys"
    OPERATOR = "callers who run the server, where there are keys"
    ADMIN = "callers who may change the server for others"


@dataclass(frozen=True, slots=True)
class QueryParameter:
    """values: which it may have; any if empty."""

    name: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One route with one method.

    answer: a struct, or one of several, a media type, or None for an empty body. example: a body
    that is answered with 200 where it names what is there. generates: counted as a generation
    while it is answered. streams: events, if asked for. names_model: the caller names a model or an
    adapter. conflicts: another caller may end what this one asked for. may_be_wrong: it may be
    refused without a body or a query that is at fault. error: the body of every status above 399.
    is_list: there are several answers. or_list: there are, if the body asks for several. or_json:
    the answer to callers who accept JSON, where others get a text. names_response: the caller names
    a response that was kept.
    """

    method: str
    path: str
    summary: str
    access: Access
    answer: type[msgspec.Struct] | tuple[type[msgspec.Struct], ...] | str | None
    body: type[BaseModel] | None = None
    example: Mapping[str, object] = field(default_factory=dict)
    needs_body: bool = True
    generates: bool = False
    streams: bool = False
    names_model: bool = False
    is_list: bool = False
    or_list: bool = False
    or_json: type[msgspec.Struct] | None = None
    error: type[msgspec.Struct] = ErrorAnswer
    in_query: tuple[QueryParameter, ...] = ()
    conflicts: bool = False
    may_be_wrong: bool = False
    names_response: bool = False

    @property
    def errors(self) -> frozenset[int]:
        """Every status besides 200 with which it may answer."""
        statuses = set(ANY_ROUTE)
        if self.access is not Access.OPEN:
            statuses.add(401)
        if self.body is not None:
            statuses |= {400, 413}
        if self.in_query or self.may_be_wrong:
            statuses.add(400)
        if self.conflicts:
            statuses.add(409)
        if self.names_model:
            statuses.add(404)
        if self.names_response:
            statuses |= {400, 404}
        return frozenset(statuses)
