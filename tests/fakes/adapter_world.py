"""Names, files, requests and a worker around an AdapterManager, with plain books of their own.

Every operation is written down naively; `check` compares the manager with these books. Whatever
is no longer as it should be raises AssertionError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.adapters.loader import Loader
from lora_serve.adapters.manager import AdapterManager
from lora_serve.config import LoRAConfig
from lora_serve.errors import AdapterExistsError, AdapterNotFoundError
from lora_serve.identity import AdapterRef
from tests.fakes.checkpoints import checkpoint_of
from tests.fakes.manual_loader import ManualLoader

NAMES = ("n0", "n1", "n2", "n3", "n4")
CONTENTS = "ABCDEF"


@dataclass
class Lease:
    """One request. state: "waiting", "loading" or "running"."""

    ref: AdapterRef
    state: str = "waiting"


def room_for(max_cpu_loras: int) -> LoRAConfig:
    return LoRAConfig(enable_lora=True, max_loras=1, max_cpu_loras=max_cpu_loras)


class World:
    def __init__(
        self, make: Callable[[LoRAConfig, Loader], AdapterManager], max_cpu_loras: int, seed: int
    ) -> None:
        self._loader = ManualLoader()
        self._manager = make(room_for(max_cpu_loras), self._loader)
        self._max_cpu_loras = max_cpu_loras
        self._random = Random(seed)
        self._current: dict[str, tuple[bytes, int]] = {}  # digest and generation
        self._generations: Counter[str] = Counter()
        self._pinned: set[str] = set()
        self._leases: list[Lease] = []
        self._held: set[bytes] = set()  # superseded, leased, and in memory when it came to that
        self._prepared: Counter[bytes] = Counter()
        self._active: set[bytes] = set()

    def run(self, num_operations: int) -> None:
        operations = [
            *(self._publish, self._unload, self._invalidate, self._acquire, self._acquire),
            *(self._admit, self._admit, self._finish_load, self._end, self._step),
        ]
        for _ in range(num_operations):
            self._random.choice(operations)()
            self._check()
        self._wind_up()

    # ── operations ──────────────────────────────────────────────────────────────────────────

    def _publish(self) -> None:
        name = self._random.choice(NAMES)
        checkpoint = checkpoint_of(self._random.choice(CONTENTS))
        load_inplace, pinned = self._random.random() < 0.7, self._random.random() < 0.1
        self._prepared[checkpoint.digest] += 1
        try:
            ref = self._manager.publish(name, checkpoint, load_inplace=load_inplace, pinned=pinned)
        except AdapterExistsError:
            assert name in self._current
            assert not load_inplace
            return
        assert ref == AdapterRef(name, checkpoint.digest, self._generations[name])
        self._current[name] = (ref.digest, ref.generation)
        self._pinned.discard(name)
        if pinned:
            self._pinned.add(name)

    def _unload(self) -> None:
        name = self._random.choice(NAMES)
        try:
            self._manager.unload(name)
        except AdapterNotFoundError:
            assert name not in self._current
        else:
            del self._current[name]
            self._pinned.discard(name)

    def _invalidate(self) -> None:
        name = self._random.choice(NAMES)
        if name not in self._current:
            return
        old, new = self._manager.invalidate(name)
        digest, generation = self._current[name]
        assert (old, new) == (
            AdapterRef(name, digest, generation),
            AdapterRef(name, digest, generation + 1),
        )
        self._generations[name] += 1
        self._current[name] = (digest, generation + 1)

    def _acquire(self) -> None:
        name = self._random.choice(NAMES)
        try:
            ref = self._manager.acquire(name)
        except AdapterNotFoundError:
            assert name not in self._current
            return
        assert ref == AdapterRef(name, *self._current[name])
        self._leases.append(Lease(ref))

    def _admit(self) -> None:
        """Do as the scheduler: run what is resident, have the rest read, once a version."""
        lease = self._pick("waiting")
        if lease is None:
            return
        if self._manager.is_resident(lease.ref):
            self._manager.on_running(lease.ref)
            lease.state = "running"
        elif not self._loading(lease.ref):
            self._manager.request_load(lease.ref)
            lease.state = "loading"

    def _finish_load(self) -> None:
        lease = self._pick("loading")
        if lease is None:
            return
        if self._random.random() < 0.2:  # the files are gone
            self._loader.finish(lease.ref, AdapterNotFoundError("no files"))
            events = self._manager.take_events()
            if events.back == [lease.ref]:  # the same bytes have come by another load
                lease.state = "waiting"
                return
            assert [ref for ref, _ in events.lost] == [lease.ref]
            for waiting in [lease for lease in self._leases if self._is_lost(lease, lease.ref)]:
                self._release(waiting)
            self._release(lease)
            return
        self._prepared[lease.ref.digest] += 1
        self._loader.finish(lease.ref, AdapterCheckpoint("/", lease.ref.digest, 8, 100, "base", ()))
        assert self._manager.take_events().back == [lease.ref]
        lease.state = "waiting"
        assert self._manager.is_resident(lease.ref), "what was read for a request is not there"

    def _end(self) -> None:
        lease = self._pick("running") if self._random.random() < 0.7 else self._pick("waiting")
        if lease is None:
            return
        if lease.state == "running":
            self._manager.on_idle(lease.ref)
        self._release(lease)

    def _step(self) -> None:
        """A worker that refuses what it cannot do."""
        drop, add = self._manager.take_changes()
        for digest in drop:
            self._active.remove(digest)
        for digest in add:
            self._prepared[digest] -= 1
            assert self._prepared[digest] >= 0, "activated more often than prepared"
            self._active.add(digest)
        for lease in self._leases:
            if lease.state == "running":
                assert lease.ref.digest in self._active, "a request runs without its weights"

    # ── the books ───────────────────────────────────────────────────────────────────────────

    def _pick(self, state: str) -> Lease | None:
        leases = [lease for lease in self._leases if lease.state == state]
        return self._random.choice(leases) if leases else None

    def _loading(self, ref: AdapterRef) -> bool:
        return any(lease.state == "loading" and lease.ref == ref for lease in self._leases)

    def _is_lost(self, lease: Lease, ref: AdapterRef) -> bool:
        return lease.state == "waiting" and lease.ref == ref

    def _release(self, lease: Lease) -> None:
        self._leases = [other for other in self._leases if other is not lease]
        self._manager.release(lease.ref)

    def _is_current(self, ref: AdapterRef) -> bool:
        return self._current.get(ref.name) == (ref.digest, ref.generation)

    def _check(self) -> None:
        manager = self._manager
        manager.check_invariants()
        infos = {info.name: info for info in manager.infos()}
        assert {
            name: (bytes.fromhex(info.digest), info.generation) for name, info in infos.items()
        } == self._current
        assert {name for name, info in infos.items() if info.pinned} == self._pinned
        num_leases = Counter(lease.ref for lease in self._leases)
        for ref, count in num_leases.items():
            assert manager.info(ref).num_leases == count
            assert (manager.current(ref.name) == ref) == self._is_current(ref)
        self._check_memory(set(num_leases))

    def _check_memory(self, leased: set[AdapterRef]) -> None:
        digests = {checkpoint_of(content).digest for content in CONTENTS}
        resident = {d for d in digests if self._manager.is_resident(AdapterRef("", d))}
        superseded = {ref.digest for ref in leased if not self._is_current(ref)}
        self._held = {digest for digest in self._held if digest in superseded}
        assert self._held <= resident, "weights are gone that could not be had again"
        self._held |= superseded & resident
        running = {lease.ref.digest for lease in self._leases if lease.state == "running"}
        assert running <= resident, "a request runs on evicted weights"
        pinned = {self._current[name][0] for name in self._pinned}
        assert pinned <= resident, "a pinned adapter was evicted"
        wanted = {digest for digest, _ in self._current.values()} | {ref.digest for ref in leased}
        assert resident <= wanted, "weights are kept that no request can ask for"
        # Weights that were read back for a request that has not run yet are kept as well.
        awaited = {ref.digest for ref in leased}
        kept = superseded | running | pinned | awaited
        assert len(resident) <= self._max_cpu_loras or resident <= kept, "more is kept than needed"

    def _wind_up(self) -> None:
        """When all requests have ended and all names are gone, nothing is left anywhere."""
        for lease in list(self._leases):
            if lease.state == "running":
                self._manager.on_idle(lease.ref)
            if lease.state == "loading":
                self._loader.finish(lease.ref, AdapterNotFoundError("no files"))
                self._manager.take_events()
            self._release(lease)
        for name in list(self._current):
            self._manager.unload(name)
            del self._current[name]
        self._pinned.clear()
        self._step()
        self._step()
        self._check()
        assert not self._active, "the worker keeps weights that no request can ask for"
        assert not +self._prepared, "the worker keeps prepared weights that no step will take"
