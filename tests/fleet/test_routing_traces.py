"""Random lives of a router against a model that keeps everything and looks at all of it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from lora_serve.fleet import prefixes, replicas, routing
from lora_serve.fleet.prefixes import MAX_CHUNKS
from lora_serve.fleet.replicas import ReplicaReport, Replicas, Standing
from lora_serve.fleet.routing import (
    FREE_LOAD,
    MAX_LOAD_RATIO,
    POLICIES,
    Router,
    RoutingRequest,
    affinity,
)
from lora_serve.identity import BASE_MODEL, EVERYTHING, Everything, NoAdapter

ADAPTERS = ("a", "b", "c")
MAX_PREFIXES = MAX_CHUNKS + 40
NUM_EVENTS = 120
NUM_TRACES = 60


@dataclass
class Model:
    """reports: of replicas that are there. sent: replica of each request that runs.

    prefixes: what was sent, and where, since its name was last replaced.
    """

    reports: dict[str, ReplicaReport] = field(default_factory=dict)
    sent: list[tuple[str, int]] = field(default_factory=list)
    others: dict[str, int] = field(default_factory=dict)
    prefixes: list[tuple[RoutingRequest, str]] = field(default_factory=list)
    starts: dict[str, int] = field(default_factory=dict)

    def num_sent(self, name: str) -> int:
        return sum(each == (name, self.starts[name]) for each in self.sent)

    def load(self, name: str) -> int:
        return self.num_sent(name) + self.others[name]

    def able(self, request: RoutingRequest) -> set[str]:
        return {
            name
            for name, report in self.reports.items()
            if not report.is_draining
            and name not in request.excluded
            and (
                isinstance(request.lora_name, NoAdapter)
                or report.standing(request.lora_name) is not Standing.UNABLE
            )
        }

    def most_shared(self, request: RoutingRequest, name: str) -> int:
        """The most chunks of the request's prompt that this replica can have been sent."""
        most = 0
        for each, where in self.prefixes:
            same = (each.lora_name, each.tenant) == (request.lora_name, request.tenant)
            if same and where == name:
                pairs = zip(each.prefix_hashes, request.prefix_hashes, strict=False)
                equal = [one == two for one, two in pairs]
                most = max(most, [*equal, False].index(False))
        return most


class Life:
    """One router and its model, which are told the same."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        policy = self.random.choice([affinity, affinity, *POLICIES.values()])
        self.policy = policy
        self.router = Router(policy, max_prefixes=MAX_PREFIXES)
        self.model = Model()

    def play(self) -> None:
        for _ in range(NUM_EVENTS):
            acts = (self.report, self.request, self.request, self.request, self.end, self.change)
            self.random.choice(acts)()
            for name in self.model.reports:
                assert self.router.load(name) == self.model.load(name)
            assert self.router.num_prefixes <= MAX_PREFIXES

    def report(self) -> None:
        name = f"r{self.random.randrange(4)}"
        names = [frozenset(n for n in ADAPTERS if self.random.random() < 0.3) for _ in range(3)]
        report = ReplicaReport(
            *names,
            known=self.random.choice([None, frozenset("ab")]),
            num_running=self.random.randrange(6),
            num_waiting=self.random.randrange(3),
            is_draining=self.random.random() < 0.15,
        )
        model = self.model
        self.router.update(name, report)
        if name not in model.reports:
            model.starts[name] = model.starts.get(name, 0) + 1
        model.reports[name] = report
        reported = report.num_running + report.num_waiting
        model.others[name] = max(0, reported - model.num_sent(name))

    def draw(self) -> RoutingRequest:
        words = [bytes([self.random.randrange(2)]) for _ in range(self.random.randrange(12))]
        hashes = tuple(b"".join(words[: end + 1]) for end in range(len(words)))
        name = self.random.choice([*ADAPTERS, BASE_MODEL])
        excluded = frozenset(f"r{n}" for n in range(4) if self.random.random() < 0.1)
        return RoutingRequest(name, self.random.choice("xy"), hashes, excluded)

    def request(self) -> None:
        request, limit = self.draw(), self.random.randrange(1, 4)
        chosen = self.router.choose(request, limit)
        able = self.model.able(request)
        assert len(set(chosen)) == len(chosen) == min(limit, len(able))
        assert able.issuperset(chosen)
        for name, length in self.router.knowledge(request).lengths.items():
            assert length <= self.model.most_shared(request, name)
        if not chosen:
            return
        self.check_load(chosen[0], able)
        self.router.sent(request, chosen[0])
        plain = replace(request, excluded=frozenset())
        now = self.router.knowledge(plain).lengths.get(chosen[0], 0)
        assert now == len(request.prefix_hashes)
        self.model.sent.append((chosen[0], self.model.starts[chosen[0]]))
        self.model.prefixes.append((request, chosen[0]))

    def check_load(self, chosen: str, able: set[str]) -> None:
        """No policy but round robin overloads a replica while another one could take it."""
        loads = {name: self.model.load(name) for name in able}
        if self.policy is routing.least_loaded:
            assert loads[chosen] == min(loads.values())
        if self.policy is affinity:
            offered = [n for n, r in self.model.reports.items() if not r.is_draining]
            mean = (sum(map(self.model.load, offered)) + 1) / len(offered)
            bound = max(FREE_LOAD, math.ceil(MAX_LOAD_RATIO * mean))
            assert loads[chosen] < bound or loads[chosen] == min(loads.values())

    def end(self) -> None:
        if self.model.sent:
            place = self.random.randrange(len(self.model.sent))
            name, start = self.model.sent[place]
            if name not in self.model.reports or start == self.model.starts[name]:
                self.model.sent.pop(place)
                self.router.ended(name)

    def change(self) -> None:
        model = self.model
        if self.random.random() < 0.3 and model.reports:
            name = self.random.choice([*model.reports])
            self.router.remove(name)
            del model.reports[name], model.others[name]
            return
        what: str | NoAdapter | Everything = self.random.choice([*ADAPTERS, BASE_MODEL, EVERYTHING])
        self.router.replaced(what)
        model.prefixes = [
            (each, where)
            for each, where in model.prefixes
            if what is not EVERYTHING and each.lora_name != what
        ]


def play_all() -> None:
    for seed in range(NUM_TRACES):
        Life(seed).play()


def test_a_router_keeps_its_word_in_random_lives() -> None:
    play_all()


Fault = Callable[[pytest.MonkeyPatch], None]


def nothing(*_: object) -> None: ...


def patched(target: object, name: str, value: object) -> Fault:
    return lambda patch: patch.setattr(target, name, value)


def adapter_key_without_tenant(self: Router, request: RoutingRequest) -> bytes:
    return self._adapter_key(request.lora_name)


def key_of_tenant_alone(self: Router, request: RoutingRequest) -> bytes:
    return request.tenant.encode()


def endless_memory(max_prefixes: int) -> prefixes.PrefixMemory:
    return prefixes.PrefixMemory(1000 * max_prefixes)


def lengths_with_gaps(
    self: prefixes.PrefixMemory, root: bytes, hashes: tuple[bytes, ...]
) -> dict[str, int]:
    return {
        name: depth for depth, key in enumerate(hashes, 2) for name in self.replicas(root + key)
    }


FAULTS: dict[str, Fault] = {
    "a replaced name keeps its prefixes": patched(Router, "replaced", nothing),
    "tenants share prefixes": patched(Router, "_root", adapter_key_without_tenant),
    "adapters share prefixes": patched(Router, "_root", key_of_tenant_alone),
    "an ended request counts for ever": patched(Replicas, "ended", nothing),
    "a request is not counted": patched(Replicas, "sent", nothing),
    "a draining replica is asked": patched(Replicas, "is_offered", Replicas.__contains__),
    "unable replicas are asked": patched(
        routing.Knowledge, "standing", lambda self, name: Standing.KNOWN
    ),
    "failed replicas are asked again": patched(
        routing.Knowledge, "can_take", lambda self, name: self.replicas.is_offered(name)
    ),
    "no load is too much": patched(routing, "MAX_LOAD_RATIO", 1000),
    "more is credited than was sent": patched(prefixes.PrefixMemory, "lengths", lengths_with_gaps),
    "what was sent is not remembered": patched(prefixes.PrefixMemory, "note", nothing),
    "prefixes are remembered without end": patched(routing, "PrefixMemory", endless_memory),
    "no home is ever withdrawn": patched(Replicas, "_withdraw", nothing),
    "loads are not sorted": patched(replicas, "insort", lambda items, item: items.append(item)),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=[*FAULTS])
def test_each_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    with pytest.raises((AssertionError, LookupError)):
        play_all()
