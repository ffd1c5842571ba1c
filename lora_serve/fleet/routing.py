"""Which replica answers a request. Pure: no Ray, no clock, no I/O, so a simulator runs it as it is.

A choice costs the same with ten replicas as with a thousand: a policy looks at the replicas that
were sent the longest known prefix, at some that hold the adapter, at the key's home and at the
least loaded ones, and only where those cannot take the request at more. It never changes an
answer's bits, only how long it takes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice

from lora_serve.fleet.prefixes import MAX_CHUNKS, PrefixMemory
from lora_serve.fleet.replicas import ReplicaReport, Replicas, Standing
from lora_serve.identity import BASE_MODEL, Everything, NoAdapter, framed

LEAST_LOADED_ASKED = 4
# What it costs to answer from there, in chunks of a prompt that need not be computed instead.
COST_OF_STANDING: Mapping[Standing, int] = {
    Standing.ON_DEVICE: 0,
    Standing.IN_MEMORY: 1,
    Standing.KNOWN: 8,
    Standing.UNKNOWN: 16,
}
# Above this share of the mean load a replica gets no request for its cache's sake.
# Source: "Consistent hashing with bounded loads", Mirrokni et al. 2016, arxiv.org/abs/1608.01350.
MAX_LOAD_RATIO = 1.25
FREE_LOAD = 4  # requests that a replica may have whatever the mean: a batch of few costs little
MAX_PREFIXES = 2**17
MAX_REPLACED_NAMES = 2**16


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """What a choice depends on.

    tenant: whose KV it may share, as the server keys it; a salt is a part of it.
    prefix_hashes: as `prefix_hashes` makes them of the prompt, in whatever form.
    excluded: replicas that have failed this request. only: the one replica that can answer it, or
    "" for all.
    """

    lora_name: str | NoAdapter = BASE_MODEL
    tenant: str = ""
    prefix_hashes: tuple[bytes, ...] = ()
    excluded: frozenset[str] = frozenset()
    only: str = ""


@dataclass(frozen=True, slots=True)
class Knowledge:
    """What a policy may look at.

    lengths: chunks of the prompt that a replica was sent before. recent: replicas that were sent
    the adapter lately, the last one first. home_key: what has one home among the replicas.
    """

    replicas: Replicas
    request: RoutingRequest
    lengths: Mapping[str, int]
    recent: tuple[str, ...]
    home_key: bytes | None

    def can_take(self, replica_id: str) -> bool:
        if replica_id in self.request.excluded or not self.replicas.is_offered(replica_id):
            return False
        return self.standing(replica_id) is not Standing.UNABLE

    def standing(self, replica_id: str) -> Standing:
        name = self.request.lora_name
        if isinstance(name, NoAdapter):
            return Standing.ON_DEVICE
        reported = self.replicas.standing(replica_id, name)
        if reported in (Standing.KNOWN, Standing.UNKNOWN) and replica_id in self.recent:
            return Standing.IN_MEMORY  # it has it by now; its next report will say so
        return reported

    def able(self, replica_ids: Iterable[str]) -> Iterator[str]:
        return (each for each in replica_ids if self.can_take(each))


Policy = Callable[[Knowledge, int], list[str]]


def least_loaded(known: Knowledge, limit: int) -> list[str]:
    """The replicas with the fewest requests."""
    return list(islice(known.able(known.replicas.by_load()), limit))


def round_robin(known: Knowledge, limit: int) -> list[str]:
    """Each replica in its turn."""
    return list(islice(known.able(known.replicas.by_turn()), limit))


def affinity(known: Knowledge, limit: int) -> list[str]:
    """The replica that has most of what the answer needs, unless it has too much to do."""
    replicas = known.replicas
    name = known.request.lora_name
    holders = [] if isinstance(name, NoAdapter) else replicas.holders(name)
    home = None if known.home_key is None else replicas.home(known.home_key)
    homes = () if home is None else (home,)
    asked = max(LEAST_LOADED_ASKED, limit)
    likely = known.able(chain(known.lengths, known.recent, holders, homes))
    pool = dict.fromkeys(chain(likely, islice(known.able(replicas.by_load()), asked)))
    bound = _load_bound(replicas)

    def cost(replica_id: str) -> tuple[int, int, bool, int]:
        load = replicas.load(replica_id)
        if load >= bound:
            return load, 0, False, 0
        missing = COST_OF_STANDING[known.standing(replica_id)] - known.lengths.get(replica_id, 0)
        return -1, missing, replica_id != home, load

    return sorted(pool, key=cost)[:limit]


def _load_bound(replicas: Replicas) -> int:
    """The load from which on a replica gets no request for its cache's sake."""
    mean = (replicas.total_load + 1) / max(1, len(replicas))
    return max(FREE_LOAD, math.ceil(MAX_LOAD_RATIO * mean))


POLICIES: Mapping[str, Policy] = {
    "affinity": affinity,
    "round-robin": round_robin,
    "least-loaded": least_loaded,
}


class Router:
    """Chooses by one policy, and remembers what it has sent where."""

    def __init__(
        self, policy: Policy = affinity, *, is_alone: bool = False, max_prefixes: int = MAX_PREFIXES
    ) -> None:
        """is_alone: no other router sends requests to the same replicas.

        max_prefixes: how many are remembered, at least as many as one prompt has.
        """
        assert max_prefixes > MAX_CHUNKS, max_prefixes
        self._policy = policy
        self._replicas = Replicas(counts_others=not is_alone)
        self._prefixes = PrefixMemory(max_prefixes)
        self._epochs = _Epochs(MAX_REPLACED_NAMES)

    @property
    def num_prefixes(self) -> int:
        return len(self._prefixes)

    def update(self, replica_id: str, report: ReplicaReport) -> None:
        """Take in what a replica says of itself; the first report makes it a candidate."""
        self._replicas.update(replica_id, report)

    def remove(self, replica_id: str) -> None:
        """Forget a replica that is gone."""
        self._replicas.remove(replica_id)

    def choose(self, request: RoutingRequest, limit: int = 3) -> list[str]:
        """The replicas to try, the best first.

        Returns:
            At most `limit`, and none only if no replica can take it: all are draining, excluded or
            unable to get the adapter.
        """
        if request.only:
            return [request.only] if self._replicas.is_offered(request.only) else []
        return self._policy(self.knowledge(request), limit)

    def knowledge(self, request: RoutingRequest) -> Knowledge:
        """What the choice for a request rests on."""
        is_base = isinstance(request.lora_name, NoAdapter)
        recent = self._prefixes.replicas(self._adapter_key(request.lora_name))
        return Knowledge(
            replicas=self._replicas,
            request=request,
            lengths=self._prefixes.lengths(self._root(request), request.prefix_hashes),
            recent=() if is_base else recent,
            home_key=_home_key(request),
        )

    def sent(self, request: RoutingRequest, replica_id: str) -> None:
        """Note that a replica gets a request; `ended` must follow."""
        self.count(replica_id)
        self.remember(request, replica_id)

    def count(self, replica_id: str) -> None:
        """The part of `sent` that `ended` takes back."""
        self._replicas.sent(replica_id)

    def remember(self, request: RoutingRequest, replica_id: str) -> None:
        """The part of `sent` that lasts: the replica has this adapter and this prefix by now."""
        self._prefixes.note(self._root(request), request.prefix_hashes, replica_id)
        if not isinstance(request.lora_name, NoAdapter):
            self._prefixes.note(self._adapter_key(request.lora_name), (), replica_id)

    def ended(self, replica_id: str) -> None:
        """Note that a request has ended, however."""
        self._replicas.ended(replica_id)

    def replaced(self, lora_name: str | NoAdapter | Everything) -> None:
        """Forget the prefixes that were sent for a name: it stands for other weights now.

        With EVERYTHING, all of them.
        """
        self._epochs.raise_for(lora_name)

    def load(self, replica_id: str) -> int:
        return self._replicas.load(replica_id)

    def _root(self, request: RoutingRequest) -> bytes:
        return framed(
            self._adapter_key(request.lora_name), request.tenant.encode("utf-8", "surrogatepass")
        )

    def _adapter_key(self, lora_name: str | NoAdapter) -> bytes:
        epoch = str(self._epochs.of(lora_name)).encode()
        return framed(epoch, *_name_fields(lora_name))


def _name_fields(lora_name: str | NoAdapter) -> tuple[bytes, ...]:
    if isinstance(lora_name, NoAdapter):
        return (b"base",)
    return b"adapter", lora_name.encode("utf-8", "surrogatepass")


def _home_key(request: RoutingRequest) -> bytes | None:
    """An adapter's prompts have one home; those of the base model, by how they begin."""
    if not isinstance(request.lora_name, NoAdapter):
        return framed(*_name_fields(request.lora_name))
    return request.prefix_hashes[0] if request.prefix_hashes else None


class _Epochs:
    """How often names were replaced, for as many names as are remembered.

    A name that is no longer remembered counts as replaced whenever another was forgotten: that
    costs hits, and can never bring an old prefix back.
    """

    def __init__(self, max_names: int) -> None:
        self._max_names = max_names
        self._last = 0
        self._of_others = 0
        self._epochs: OrderedDict[str | NoAdapter, int] = OrderedDict()

    def of(self, lora_name: str | NoAdapter) -> int:
        return self._epochs.get(lora_name, self._of_others)

    def raise_for(self, lora_name: str | NoAdapter | Everything) -> None:
        self._last += 1
        if isinstance(lora_name, Everything):
            self._epochs.clear()
            self._of_others = self._last
            return
        self._epochs[lora_name] = self._last
        self._epochs.move_to_end(lora_name)
        if len(self._epochs) > self._max_names:
            self._epochs.popitem(last=False)
            self._of_others = self._last
