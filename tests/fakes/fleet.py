"""A fleet in one process: replicas with engines of a test's own, and no Ray."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from lora_serve.config import ServerConfig
from lora_serve.fleet.messages import AnswerHead, ReplicaLostError, RequestHead, WholeAnswer
from lora_serve.fleet.replica import Replica
from lora_serve.fleet.reports import report_of
from lora_serve.fleet.routing import POLICIES, Router, RoutingRequest
from lora_serve.server.adapter_names.base import AdapterNames
from lora_serve.server.adapter_names.local import LocalNames
from lora_serve.server.app import create_app
from lora_serve.server.engine_api import Engine
from lora_serve.server.http.auth import KeyRing


class LocalFleet:
    """Asks one replica after the other. asked: who was asked, in order.

    lost_after: parts of an answer after which a replica is lost, by its id. lost_at_end: those that
    are lost behind the last part. lost: those that are.
    reports_again: False for what is asked between two reports.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        server: ServerConfig,
        policy: str = "affinity",
        names: Sequence[AdapterNames] = (),
    ) -> None:
        """names: of the engines, in a catalog; without any, each has names of its own."""
        self.router = Router(POLICIES[policy], is_alone=True)
        self.replicas = {
            f"r{number}": _replica(f"r{number}", engine, server, of_it)
            for number, (engine, of_it) in enumerate(
                zip(engines, names or map(LocalNames, engines), strict=True)
            )
        }
        self.lost_after: dict[str, int] = {}
        self.lost_at_end: set[str] = set()
        self.lost: set[str] = set()
        self.reports_again = True
        self.asked: list[str] = []

    async def report(self) -> None:
        """Have every replica report to the router, which Ray Serve does once a second."""
        for name in self.replicas.keys() - self.lost:
            self.router.update(name, report_of(await self.replicas[name].stats()))

    async def answer(
        self, routing: RoutingRequest, head: RequestHead, body: bytes
    ) -> AsyncGenerator[str | AnswerHead | bytes, None]:
        if self.reports_again:
            await self.report()
        others = [name for name in self.replicas if name not in routing.excluded]
        name = (self.router.choose(routing) or others or [*self.replicas])[0]
        self.asked.append(name)
        self.router.sent(routing, name)
        num_parts = 0
        try:
            async with aclosing(self.replicas[name].answer(head, body)) as parts:
                async for part in parts:
                    if num_parts == self.lost_after.get(name):
                        self.lost.add(name)
                        self.router.remove(name)
                        raise ReplicaLostError(f"{name} was killed")
                    yield part
                    num_parts += 1
            if name in self.lost_at_end:
                raise ReplicaLostError(f"{name} was killed behind its answer")
        finally:
            self.router.ended(name)

    async def ask_all(self, head: RequestHead, body: bytes) -> list[WholeAnswer]:
        present = [r for name, r in self.replicas.items() if name not in self.lost_after]
        if not present:
            raise ReplicaLostError("no replica")
        return [await replica.answer_whole(head, body) for replica in present]


def _replica(name: str, engine: Engine, server: ServerConfig, names: AdapterNames) -> Replica:
    keys = KeyRing(server)
    return Replica(name, engine, create_app(engine, server, keys=keys, names=names), names, keys)
