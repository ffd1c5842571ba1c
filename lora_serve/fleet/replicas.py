"""What a router knows of its replicas: what they said last, and what it has sent them since.

Every question is answered without a look at all replicas or at all adapters. Decides nothing.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice

import xxhash

PLACES_ON_RING = 32  # of one replica: how evenly the keys are spread
HOLDERS_ASKED = 16  # of an adapter that is in the memory of more replicas, these at a time


class Standing(IntEnum):
    """How far a replica is from answering for an adapter."""

    UNABLE = 0  # it has said that it cannot answer for the adapter
    UNKNOWN = 1  # it has not heard of the name
    KNOWN = 2  # it would have to read the adapter first
    IN_MEMORY = 3
    ON_DEVICE = 4


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica says of itself; it may be some seconds old.

    on_device, in_memory, unable: names of adapters; unable is None where it can answer for none.
    known: all names that it has heard of, or None if it knows every name, as replicas with one
    catalog do. is_draining: it takes no more requests.
    """

    on_device: frozenset[str] = frozenset()
    in_memory: frozenset[str] = frozenset()
    unable: frozenset[str] | None = frozenset()
    known: frozenset[str] | None = None
    num_running: int = 0
    num_waiting: int = 0
    is_draining: bool = False

    def standing(self, lora_name: str) -> Standing:
        if self.unable is None or lora_name in self.unable:
            return Standing.UNABLE
        if lora_name in self.on_device:
            return Standing.ON_DEVICE
        if lora_name in self.in_memory:
            return Standing.IN_MEMORY
        is_known = self.known is None or lora_name in self.known
        return Standing.KNOWN if is_known else Standing.UNKNOWN

    @property
    def loaded(self) -> frozenset[str]:
        """The adapters whose weights it has."""
        return self.on_device | self.in_memory


@dataclass(slots=True)
class _Replica:
    report: ReplicaReport
    num_sent: int = 0  # by this router, and not ended
    num_of_others: int = 0  # that other routers have sent, as the last report shows it

    @property
    def load(self) -> int:
        return self.num_sent + self.num_of_others


@dataclass(slots=True)
class Replicas:
    """The replicas of one router. Only those that are not draining are offered.

    counts_others: other routers send requests to the same replicas, so what a report counts above
    this router's own is theirs. A lone router knows its replicas' load better than old reports do.
    """

    counts_others: bool = True
    total_load: int = 0  # of the offered ones
    _replicas: dict[str, _Replica] = field(default_factory=dict)
    _holders: dict[str, OrderedDict[str, None]] = field(default_factory=dict)  # by adapter
    _by_load: dict[int, OrderedDict[str, None]] = field(default_factory=dict)
    _loads: list[int] = field(default_factory=list)  # the keys of _by_load, sorted
    _turns: OrderedDict[str, None] = field(default_factory=OrderedDict)  # last sent to, last
    _ring: list[tuple[int, str]] = field(default_factory=list)  # sorted places, and whose they are

    def __contains__(self, replica_id: object) -> bool:
        return replica_id in self._replicas

    def __len__(self) -> int:
        """How many are offered."""
        return len(self._turns)

    def update(self, replica_id: str, report: ReplicaReport) -> None:
        """Take in a replica's report; the first one makes it known.

        Linear in what it holds, and in the number of replicas when one comes, drains or goes.
        """
        replica = self._replicas.get(replica_id)
        if replica is None:
            replica = self._replicas[replica_id] = _Replica(ReplicaReport(is_draining=True))
        was, before = replica.report, replica.load
        reported = report.num_running + report.num_waiting
        replica.report = report
        replica.num_of_others = max(0, reported - replica.num_sent) if self.counts_others else 0
        self._update_holders(replica_id, was, report)
        if not was.is_draining:
            self._leave_load(replica_id, before)
        if not report.is_draining:
            self._enter_load(replica_id, replica.load)
        if was.is_draining and not report.is_draining:
            self._offer(replica_id)
        elif report.is_draining and not was.is_draining:
            self._withdraw(replica_id)

    def remove(self, replica_id: str) -> None:
        """Forget a replica that is gone; again, it does nothing."""
        if replica_id in self._replicas:
            self.update(replica_id, ReplicaReport(is_draining=True))
            del self._replicas[replica_id]

    def sent(self, replica_id: str) -> None:
        """Count a request that it was sent."""
        self._change_load(replica_id, +1)
        if replica_id in self._turns:
            self._turns.move_to_end(replica_id)

    def ended(self, replica_id: str) -> None:
        """Count the end of one, however it ended."""
        self._change_load(replica_id, -1)

    def is_offered(self, replica_id: str) -> bool:
        return replica_id in self._turns

    def load(self, replica_id: str) -> int:
        """Requests that it has and that have not ended, as far as is known."""
        return self._replicas[replica_id].load

    def standing(self, replica_id: str, lora_name: str) -> Standing:
        return self._replicas[replica_id].report.standing(lora_name)

    def holders(self, lora_name: str) -> list[str]:
        """Replicas that have said that they hold it, at most HOLDERS_ASKED."""
        return list(islice(self._holders.get(lora_name, ()), HOLDERS_ASKED))

    def by_load(self) -> Iterator[str]:
        """The offered ones, the least loaded first; of equal ones that which waited longest."""
        for load in self._loads:
            yield from self._by_load[load]

    def by_turn(self) -> Iterator[str]:
        """The offered ones, that which was sent a request last, last."""
        return iter(self._turns)

    def home(self, key: bytes) -> str | None:
        """The offered replica that `key` belongs to, the same for every router that knows them.

        When a replica comes or goes, only its own keys change their home.
        Source: Karger et al. 1997, "Consistent hashing and random trees".
        """
        if not self._ring:
            return None
        place = bisect_left(self._ring, (xxhash.xxh3_64_intdigest(key), ""))
        return self._ring[place % len(self._ring)][1]

    def _update_holders(self, replica_id: str, was: ReplicaReport, now: ReplicaReport) -> None:
        before = frozenset() if was.is_draining else was.loaded
        after = frozenset() if now.is_draining else now.loaded
        for name in before - after:
            holders = self._holders[name]
            del holders[replica_id]
            if not holders:
                del self._holders[name]
        for name in after - before:
            self._holders.setdefault(name, OrderedDict())[replica_id] = None

    def _change_load(self, replica_id: str, by: int) -> None:
        replica = self._replicas.get(replica_id)
        if replica is None:  # it went while it was at this request
            return
        before = replica.load
        replica.num_sent += by
        if not replica.report.is_draining:
            self._leave_load(replica_id, before)
            self._enter_load(replica_id, replica.load)

    def _enter_load(self, replica_id: str, load: int) -> None:
        self.total_load += load
        if load not in self._by_load:
            self._by_load[load] = OrderedDict()
            insort(self._loads, load)
        self._by_load[load][replica_id] = None

    def _leave_load(self, replica_id: str, load: int) -> None:
        self.total_load -= load
        bucket = self._by_load[load]
        del bucket[replica_id]
        if not bucket:
            del self._by_load[load]
            del self._loads[bisect_left(self._loads, load)]

    def _offer(self, replica_id: str) -> None:
        self._turns[replica_id] = None
        for number in range(PLACES_ON_RING):
            place = xxhash.xxh3_64_intdigest(f"{number} {replica_id}".encode())
            insort(self._ring, (place, replica_id))

    def _withdraw(self, replica_id: str) -> None:
        del self._turns[replica_id]
        self._ring = [each for each in self._ring if each[1] != replica_id]
