"""How far a change has come: on which replicas a name is as its record says.

Pure: standings in, a verdict out. Only a replica's own report counts for it; one that is silent
may still answer as before, so while it is registered nothing is everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from lora_serve.catalog.records import Record, Standing

LEASE_SECONDS = 10.0  # after so long without a word a replica has not been heard from


class State(StrEnum):
    """How one name stands on one replica. BEHIND: it has not told that it knows of the change."""

    READY = "ready"
    LOADING = "loading"
    FAILED = "failed"
    BEHIND = "behind"
    SILENT = "not heard from"


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """What one replica makes of a record. detail: why, where it is not ready."""

    replica_id: str
    address: str
    state: State
    detail: str = ""

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to wait for."""
        return self.state in (State.READY, State.FAILED, State.SILENT)

    def __str__(self) -> str:
        return f"{self.replica_id} ({self.state}{f': {self.detail}' if self.detail else ''})"


@dataclass(frozen=True, slots=True)
class Rollout:
    """A record, and what each replica makes of it."""

    record: Record
    replicas: tuple[ReplicaState, ...]

    @property
    def is_everywhere(self) -> bool:
        """Whether no replica can answer with an earlier version any more, and all can with this."""
        return all(replica.state is State.READY for replica in self.replicas)

    @property
    def is_settled(self) -> bool:
        return all(replica.is_settled for replica in self.replicas)

    @property
    def missing(self) -> tuple[ReplicaState, ...]:
        return tuple(one for one in self.replicas if one.state is not State.READY)

    def __str__(self) -> str:
        if self.is_everywhere:
            return f"everywhere: {len(self.replicas)} of {len(self.replicas)} replicas have it"
        named = ", ".join(map(str, self.missing))
        num_ready = len(self.replicas) - len(self.missing)
        return f"on {num_ready} of {len(self.replicas)} replicas; not on {named}"


def rollout_of(
    record: Record, standings: Iterable[Standing], lease_seconds: float = LEASE_SECONDS
) -> Rollout:
    """How far `record` has come, or a later one of its name: that has taken its place."""
    return Rollout(record, tuple(_state(record, one, lease_seconds) for one in standings))


def _state(record: Record, standing: Standing, lease_seconds: float) -> ReplicaState:
    member, report = standing.member, standing.report
    state, detail = State.READY, ""
    failure, loading = report.failed.get(record.name), report.loading.get(record.name)
    if report.serial < record.serial:
        state = State.BEHIND
    elif failure is not None:
        state, detail = State.FAILED, failure.reason
    elif loading is not None:
        state = State.LOADING
    if state in (State.BEHIND, State.LOADING) and standing.silent_seconds > lease_seconds:
        state, detail = State.SILENT, f"for {standing.silent_seconds:.0f} s"
    return ReplicaState(member.replica_id, member.address, state, detail)
