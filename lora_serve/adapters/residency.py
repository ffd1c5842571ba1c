"""Which adapters' weights are in the workers' memory, and which go when it is full.

Weights are kept by digest: two names may share them. Weights that a request runs on, or that could
not be read again, are never evicted; the bound is exceeded instead. Knows digests and claims, no
names. Every operation but `claims` takes constant time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class Claim(Enum):
    """How strongly the registry's versions want the weights of a digest."""

    NONE = "no request can ask for them: they are dropped"
    IDLE = "a name stands for them: first to be evicted"
    LEASED = "requests wait for them, and they can be read again: evicted next"
    PROTECTED = "pinned, or leased by a version whose files may be gone: never evicted"


@dataclass(slots=True)
class _Resident:
    claim: Claim
    num_running: int = 0
    is_awaited: bool = False  # read back for a request that has not run yet

    @property
    def is_evictable(self) -> bool:
        is_kept = self.claim is Claim.PROTECTED or self.num_running > 0
        return not is_kept and not (self.is_awaited and self.claim is Claim.LEASED)


class AdapterResidency:
    """The digests in the workers' memory, at most `max_cpu_loras` where claims allow."""

    def __init__(self, max_cpu_loras: int) -> None:
        self._max_cpu_loras = max_cpu_loras
        self._residents: dict[bytes, _Resident] = {}
        # What may be evicted, least recently used first.
        self._victims: dict[Claim, OrderedDict[bytes, None]] = {
            Claim.IDLE: OrderedDict(),
            Claim.LEASED: OrderedDict(),
        }
        # For the next step. The workers hold one prepared copy for each entry of `_add`.
        self._drop: list[bytes] = []
        self._add: list[bytes] = []
        self._active: set[bytes] = set()  # what the workers have after the changes taken so far
        self.num_loads = 0
        self.num_evictions = 0

    def is_resident(self, digest: bytes) -> bool:
        return digest in self._residents

    def claims(self) -> Iterator[tuple[bytes, Claim]]:
        """All residents with their claims, as `settle` was given them."""
        return ((digest, resident.claim) for digest, resident in self._residents.items())

    def add(self, digest: bytes, claim: Claim, *, is_awaited: bool = False) -> None:
        """Note that the workers have prepared the weights (again).

        is_awaited: they were read for a waiting request, and stay until it has run or ended.
        """
        self.num_loads += 1
        self._add.append(digest)
        resident = self._residents.setdefault(digest, _Resident(claim))
        resident.is_awaited |= is_awaited
        self.settle(digest, claim)

    def settle(self, digest: bytes, claim: Claim) -> None:
        """Take in how a digest is used now. Counts as a use of it."""
        resident = self._residents.get(digest)
        if resident is None:
            return
        resident.claim = claim
        resident.is_awaited &= claim is not Claim.IDLE
        if claim is Claim.NONE and resident.num_running == 0:
            self._remove(digest)
        else:
            self._note_use(digest, resident)
        self._shrink()

    def on_running(self, digest: bytes) -> None:
        """A request runs on these weights, until `on_idle`."""
        assert digest in self._residents, f"{digest.hex()}: a request runs without its weights"
        resident = self._residents[digest]
        resident.num_running += 1
        resident.is_awaited = False
        self._note_use(digest, resident)

    def on_idle(self, digest: bytes) -> None:
        """One of the requests that ran on them has ended."""
        resident = self._residents[digest]
        resident.num_running -= 1
        assert resident.num_running >= 0, f"{digest.hex()}: more requests ended than ran"
        self.settle(digest, resident.claim)

    def take_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """The digests that the next step has to (drop, add), in this order, since the last call."""
        if not (self._drop or self._add):
            return (), ()
        drop, add = tuple(dict.fromkeys(self._drop)), tuple(self._add)
        self._active.difference_update(drop)
        self._active.update(add)
        # What was prepared and is no longer wanted has to arrive before it can go.
        self._drop = [digest for digest in add if digest not in self._residents]
        self._add = []
        return drop, add

    def _note_use(self, digest: bytes, resident: _Resident) -> None:
        """Make a resident that may be evicted the most recently used of those with its claim."""
        for victims in self._victims.values():
            victims.pop(digest, None)
        if resident.is_evictable and resident.claim in self._victims:
            self._victims[resident.claim][digest] = None

    def _shrink(self) -> None:
        for victims in self._victims.values():
            while len(self._residents) > self._max_cpu_loras and victims:
                self._remove(next(iter(victims)))
                self.num_evictions += 1

    def _remove(self, digest: bytes) -> None:
        del self._residents[digest]
        for victims in self._victims.values():
            victims.pop(digest, None)
        if digest in self._active:
            self._drop.append(digest)

    def check_invariants(self) -> None:
        """Assert what must hold after every operation."""
        for digest, resident in self._residents.items():
            assert resident.claim is not Claim.NONE or resident.num_running, "kept without need"
            for claim, victims in self._victims.items():
                is_victim = resident.is_evictable and resident.claim is claim
                assert (digest in victims) == is_victim, f"{digest.hex()} among {claim.name}"
        num_victims = sum(len(victims) for victims in self._victims.values())
        assert num_victims <= len(self._residents), "a victim is not resident"
        assert len(self._residents) <= self._max_cpu_loras or not num_victims, "kept beyond need"
        expected = self._active.difference(self._drop).union(self._add)
        assert expected >= set(self._residents), "a resident will not reach the workers"
