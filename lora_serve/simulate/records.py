"""What became of each request of a simulation, and of the whole."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.bench.workload import TimedRequest
from lora_serve.simulate.rollout import RolledOut


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One request's times, in virtual seconds, as its client would see them.

    sent, first_token, last_token: on the simulation's clock; the tokens' 0 until they come.
    version: of its adapter, 0 where nothing was rolled out.
    """

    adapter: str | None
    prompt_tokens: int
    sent: float
    replica: int
    version: int = 0
    first_token: float = 0.0
    last_token: float = 0.0
    output_tokens: int = 0
    cached_tokens: int = 0
    is_done: bool = False
    error: str | None = None

    @classmethod
    def of(cls, request: TimedRequest, sent: float, replica: int) -> SimulatedRequest:
        return cls(request.adapter, len(request.prompt_token_ids), sent, replica)

    @property
    def ttft_seconds(self) -> float:
        return self.first_token - self.sent

    @property
    def e2e_seconds(self) -> float:
        return self.last_token - self.sent

    @property
    def tpot_seconds(self) -> float | None:
        """Mean time of a token after the first; None if there was none."""
        if self.output_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over all replicas. busy_seconds: of each replica, spent in steps."""

    num_steps: int
    num_computed_tokens: int
    num_preemptions: int
    adapter_loads: int
    adapter_evictions: int
    busy_seconds: tuple[float, ...]
    num_events: int


@dataclass(frozen=True, slots=True)
class Simulated:
    """records: in the order in which they were sent. wall_seconds: to the last answer's end."""

    records: tuple[SimulatedRequest, ...]
    wall_seconds: float
    totals: Totals
    rolled_out: tuple[RolledOut, ...] = ()
