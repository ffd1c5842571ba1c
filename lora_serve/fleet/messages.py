"""What an ingress and a replica say to each other about one HTTP request."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Scope

RawHeaders = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A request without its body, as ASGI has it."""

    method: str
    path: str
    query: bytes
    headers: RawHeaders
    client: tuple[str, int] | None
    scheme: str

    def scope(self) -> Scope:
        """The ASGI scope of this request."""
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "path": self.path,
            "raw_path": self.path.encode("utf-8", "surrogateescape"),
            "query_string": self.query,
            "root_path": "",
            "headers": [*self.headers],
            "client": self.client,
            "server": None,
            "scheme": self.scheme,
            "state": {},
        }


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The beginning of an answer.

    must_go_elsewhere: the replica cannot answer now, and another one might: it is ending, or has no
    engine or not this adapter at the moment. The answer says so, for a client whom no other replica
    can answer either.
    """

    status: int
    headers: RawHeaders
    replica_id: str
    must_go_elsewhere: bool = False


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer to its end."""

    head: AnswerHead
    body: bytes


class ReplicaLostError(Exception):
    """The replica that was answering is gone, and how far it came is all that will come."""
