"""Names and memory of adapters together, for the engine's thread.

After every change of versions or leases, the memory learns which digests are still wanted.
Decides no order of requests and reads no file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from lora_serve.adapters.registry import AdapterRegistry, AdapterVersion
from lora_serve.adapters.residency import AdapterResidency, Claim
from lora_serve.errors import AdapterChangedError
from lora_serve.identity import AdapterRef
from lora_serve.messages import AdapterInfo
from lora_serve.step import AdapterCheckpoint


class AdapterManager:
    """Adapters from their first load to their last lease. One thread owns it."""

    def __init__(self, max_cpu_loras: int, clock: Callable[[], float] = time.time) -> None:
        self._registry = AdapterRegistry(clock)
        self._residency = AdapterResidency(max_cpu_loras)
        self._loading: set[AdapterRef] = set()

    # ── names ───────────────────────────────────────────────────────────────────────────────

    def check_name_free(self, name: str, load_inplace: bool) -> None:
        """Raise AdapterExistsError if `publish` would, before anything is read."""
        self._registry.check_name_free(name, load_inplace)

    def publish(
        self, name: str, checkpoint: AdapterCheckpoint, *, load_inplace: bool, pinned: bool = False
    ) -> AdapterRef:
        """Make `name` stand for a checkpoint that the workers have prepared.

        Raises:
            AdapterExistsError: as AdapterRegistry.publish; call `discard_prepared` then.
        """
        before = self._registry.get(name)
        ref = self._registry.publish(name, checkpoint, load_inplace=load_inplace, pinned=pinned)
        if before is not None:
            self._settle(before)  # what it gives up makes room
        self._residency.add(ref.digest, self._claim(ref.digest))
        return ref

    def discard_prepared(self, digest: bytes) -> None:
        """Give up weights that the workers have prepared and that will not be published."""
        self._residency.add(digest, self._claim(digest))

    def unload(self, name: str) -> None:
        """Remove the name at once; the weights go with the last lease.

        Raises:
            AdapterNotFoundError: there is no such name.
        """
        self._settle(self._registry.unload(name))

    def invalidate(self, name: str) -> tuple[AdapterRef, AdapterRef]:
        """Raise the generation; returns (old, new) version. Raises AdapterNotFoundError."""
        old, new = self._registry.invalidate(name)
        self._settle(old)
        return old, new

    def restore(self, adapters: Sequence[AdapterInfo], generations: Mapping[str, int]) -> None:
        """Take over the adapters of an earlier engine, all of them as evicted."""
        for name, generation in generations.items():
            self._registry.raise_generation(name, generation)
        for info in adapters:
            self._registry.restore(info)

    # ── leases ──────────────────────────────────────────────────────────────────────────────

    def acquire(self, name: str) -> AdapterRef:
        """Lease what the name stands for, until `release`. Raises AdapterNotFoundError."""
        ref = self._registry.acquire(name)
        self._settle(ref)
        return ref

    def release(self, ref: AdapterRef) -> None:
        self._registry.release(ref)
        self._settle(ref)

    # ── lookups ─────────────────────────────────────────────────────────────────────────────

    def version(self, ref: AdapterRef) -> AdapterVersion:
        return self._registry.version(ref)

    def info(self, ref: AdapterRef) -> AdapterInfo:
        return self._registry.info(ref, is_resident=self.is_resident(ref))

    def infos(self) -> list[AdapterInfo]:
        """Describe all adapters that have a name."""
        return [self.info(ref) for ref in self._registry.current_refs]

    def current(self, name: str) -> AdapterRef | None:
        """The version that the name stands for, without a lease on it."""
        return self._registry.get(name)

    def is_resident(self, ref: AdapterRef) -> bool:
        return self._residency.is_resident(ref.digest)

    @property
    def num_loads(self) -> int:
        return self._residency.num_loads

    @property
    def num_evictions(self) -> int:
        return self._residency.num_evictions

    @property
    def num_over_bound(self) -> int:
        """How many loads exceeded the bound, because no adapter could be evicted."""
        return self._residency.num_over_bound

    # ── memory ──────────────────────────────────────────────────────────────────────────────

    def begin_load(self, ref: AdapterRef) -> None:
        """Note that an evicted version is being read again, until `finish_load` or `fail_load`."""
        assert ref not in self._loading, f"{ref.name} is being read already"
        self._loading.add(ref)

    def verify_reload(self, ref: AdapterRef, checkpoint: AdapterCheckpoint) -> None:
        """Check that the bytes read again are still that version.

        Raises:
            AdapterChangedError: the files have changed.
        """
        if checkpoint.digest != ref.digest:
            raise AdapterChangedError(
                f"The files of lora adapter '{ref.name}' at {checkpoint.path} have changed since "
                f"it was loaded (digest {ref.digest.hex()[:12]}, now "
                f"{checkpoint.digest.hex()[:12]}); load it again with load_inplace, or restore them"
            )

    def finish_load(self, ref: AdapterRef) -> None:
        """Note that it has been read and verified, and that the workers have prepared it."""
        self._loading.remove(ref)
        self._residency.add(ref.digest, self._claim(ref.digest), is_awaited=True)

    def fail_load(self, ref: AdapterRef) -> None:
        """Note that it cannot be read; the caller ends the requests that wait for it."""
        self._loading.remove(ref)

    def on_running(self, ref: AdapterRef) -> None:
        """A request runs on this version; its weights stay until `on_idle`."""
        self._residency.on_running(ref.digest)

    def on_idle(self, ref: AdapterRef) -> None:
        self._residency.on_idle(ref.digest)

    def take_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Digests for the next step's (drop_adapters, add_adapters), since the last call."""
        return self._residency.take_changes()

    def _claim(self, digest: bytes) -> Claim:
        use = self._registry.use_of(digest)
        if use is None:
            return Claim.NONE
        if use.num_pinned or use.num_superseded_leases:
            return Claim.PROTECTED
        return Claim.LEASED if use.num_leases else Claim.IDLE

    def _settle(self, ref: AdapterRef) -> None:
        self._residency.settle(ref.digest, self._claim(ref.digest))

    def check_invariants(self) -> None:
        """Assert what must hold after every operation."""
        self._registry.check_invariants()
        self._residency.check_invariants()
        for digest, claim in self._residency.claims():
            assert claim is self._claim(digest), f"{digest.hex()} was not settled: {claim.name}"
