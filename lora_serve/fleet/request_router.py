"""Ray Serve's request router, which chooses as `routing.py` does.

Runs in every process that has a handle of the replicas. Ray Serve tells it which replicas there
are, what they report, what is sent to them and what ends.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from lora_serve.fleet.reports import Versions, report_of
from lora_serve.fleet.routing import POLICIES, Router, RoutingRequest
from lora_serve.identity import BASE_MODEL

ANY_REQUEST = RoutingRequest()


class FleetRequestRouter(RequestRouter):
    """One for each handle; a request's first argument is its RoutingRequest."""

    def initialize_state(self, **kwargs: Any) -> None:
        """policy: one of POLICIES. is_alone: no other process has requests of its own."""
        self._router = Router(POLICIES[kwargs["policy"]], is_alone=kwargs["is_alone"])
        self._versions = Versions()
        self._by_id: dict[str, RunningReplica] = {}
        self._reported: dict[str, object] = {}  # by replica: what it said last
        self._num_sent: Counter[str] = Counter()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The replicas to try, each a rank of its own: Ray Serve would pick within a rank."""
        request = _routing_of(pending_request)
        chosen = self._router.choose(request)
        if not chosen:  # let a replica say why it cannot
            asked = replace(request, lora_name=BASE_MODEL, prefix_hashes=(), only="")
            chosen = self._router.choose(asked) or self._router.choose(ANY_REQUEST)
        if chosen and pending_request is not None:
            self._router.remember(request, chosen[0])
        ranks = [[self._by_id[each]] for each in chosen if each in self._by_id]
        if ranks:
            return ranks
        others = [e for e in candidate_replicas if e.replica_id.unique_id not in request.excluded]
        return [[each] for each in others or candidate_replicas]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._by_id = {each.replica_id.unique_id: each for each in replicas}
        for gone in self._reported.keys() - self._by_id.keys():
            self._forget(gone)
        for name, running in self._by_id.items():
            stats = running.routing_stats
            if name in self._reported and self._reported[name] == stats:
                continue
            self._reported[name] = stats
            for lora_name in self._versions.replaced(stats):
                self._router.replaced(lora_name)
            self._router.update(name, report_of(stats))

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._by_id.pop(replica_id.unique_id, None)
        self._forget(replica_id.unique_id)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._num_sent[replica_id.unique_id] += 1
        self._router.count(replica_id.unique_id)

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        super().on_request_routed(pending_request, replica_id, result)
        self._router.remember(_routing_of(pending_request), replica_id.unique_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        if self._num_sent[replica_id.unique_id] > 0:  # it may have ended before it was sent
            self._num_sent[replica_id.unique_id] -= 1
            self._router.ended(replica_id.unique_id)

    def _forget(self, name: str) -> None:
        self._reported.pop(name, None)
        self._num_sent.pop(name, None)
        self._router.remove(name)


def _routing_of(pending_request: PendingRequest | None) -> RoutingRequest:
    if pending_request is not None and pending_request.args:
        first = pending_request.args[0]
        if isinstance(first, RoutingRequest):
            return first
    return ANY_REQUEST
