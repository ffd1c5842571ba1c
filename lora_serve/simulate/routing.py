"""The fleet's router before simulated replicas, which are numbered from 0.

It is the only router, as with `lora-serve serve --replicas`: it knows all that is sent and what has
ended. What it does not see is what each replica holds in memory, and of that it hears now and then.
"""

from __future__ import annotations

from array import array

from lora_serve.bench.workload import TimedRequest
from lora_serve.fleet.prefixes import prefix_hashes
from lora_serve.fleet.replicas import ReplicaReport
from lora_serve.fleet.routing import POLICIES, Router, RoutingRequest
from lora_serve.identity import BASE_MODEL

REPORT_SECONDS = 10.0  # between two reports, as Ray Serve asks for them unless it is told otherwise


class SimulatedRouter:
    """Chooses by a policy of `fleet/routing.py`, from the first request on among all replicas."""

    def __init__(self, policy: str, num_replicas: int) -> None:
        self._router = Router(POLICIES[policy], is_alone=True)
        for replica in range(num_replicas):
            self._router.update(str(replica), ReplicaReport())

    def choose(self, request: TimedRequest) -> int:
        """The replica that gets the request, from now until `ended`."""
        # Four bytes a token: a chunk of a prefix is as many tokens as it is of a text, about.
        prompt = array("I", request.prompt_token_ids).tobytes()
        routed = RoutingRequest(
            lora_name=BASE_MODEL if request.adapter is None else request.adapter,
            prefix_hashes=prefix_hashes(prompt),
        )
        (chosen,) = self._router.choose(routed, limit=1)
        self._router.sent(routed, chosen)
        return int(chosen)

    def ended(self, replica: int) -> None:
        self._router.ended(str(replica))

    def report(self, replica: int, on_device: frozenset[str], in_memory: frozenset[str]) -> None:
        """Hear from a replica which adapters it runs now, and which others it has in memory."""
        self._router.update(str(replica), ReplicaReport(on_device=on_device, in_memory=in_memory))

    def replaced(self, lora_name: str) -> None:
        """Hear that a name stands for other weights now."""
        self._router.replaced(lora_name)
