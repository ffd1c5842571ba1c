"""Which version a name stands for, and which earlier versions still have requests.

A version lives while it is current or leased; a request that leases one keeps it to its end,
whatever happens to the name. Holds no tensor and knows nothing of memory. One thread, no locks;
every operation but `paths` takes the same time however many adapters there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.errors import ASK_FOR_BASE_MODEL, AdapterExistsError, AdapterNotFoundError
from lora_serve.identity import AdapterRef
from lora_serve.messages import AdapterInfo


@dataclass(slots=True)
class DigestUse:
    """How the living versions use the bytes of one digest."""

    num_versions: int = 0
    num_pinned: int = 0
    num_leases: int = 0
    num_superseded_leases: int = 0


@dataclass(slots=True)
class _Version:
    facts: AdapterCheckpoint  # as last published, without its tensors
    created: float
    num_leases: int = 0
    is_current: bool = False
    pinned: bool = False  # only while it is current


def adapter_info(
    ref: AdapterRef,
    facts: AdapterCheckpoint,
    *,
    is_resident: bool = False,
    pinned: bool = False,
    num_leases: int = 0,
    created: float = 0.0,
) -> AdapterInfo:
    return AdapterInfo(
        name=ref.name,
        path=facts.path,
        digest=ref.digest.hex(),
        generation=ref.generation,
        rank=facts.rank,
        num_bytes=facts.num_bytes,
        residency="resident" if is_resident else "evicted",
        pinned=pinned,
        num_leases=num_leases,
        created=created,
        base_model=facts.base_model,
        invocation_tokens=facts.invocation_tokens,
    )


class AdapterRegistry:
    """Names, their versions, and the leases on the versions."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._current: dict[str, AdapterRef] = {}
        self._versions: dict[AdapterRef, _Version] = {}
        self._uses: dict[bytes, DigestUse] = {}
        self._generations: dict[str, int] = {}  # of names whose KV was ever forgotten
        self.watchers: list[Callable[[str, AdapterRef | None], None]] = []  # told name, version

    # ── names ───────────────────────────────────────────────────────────────────────────────

    def check_name_free(self, name: str, load_inplace: bool) -> None:
        """Raise AdapterExistsError if `publish` would."""
        if name in self._current and not load_inplace:
            raise AdapterExistsError(
                f"The lora adapter '{name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True."
            )

    def publish(
        self,
        name: str,
        checkpoint: AdapterCheckpoint,
        *,
        load_inplace: bool,
        pinned: bool = False,
        generation: int = 0,
    ) -> AdapterRef:
        """Make `name` stand for these bytes, from the next `acquire` on.

        Bytes that a living version of this name has already are that version again, with its
        leases; path and pin are those of this call. generation: the least it may have.

        Raises:
            AdapterExistsError: the name is taken and `load_inplace` is not set.
        """
        self.check_name_free(name, load_inplace)
        if generation:
            self.raise_generation(name, generation)
        return self._publish(name, checkpoint.without_tensors(), pinned)

    def unload(self, name: str) -> AdapterRef:
        """Remove `name`; returns the version that it stood for.

        Raises:
            AdapterNotFoundError: it stands for nothing now.
        """
        ref = self._current_ref(name)
        self._set_current(name, None)
        self._retire(ref)
        return ref

    def invalidate(self, name: str, generation: int = 0) -> tuple[AdapterRef, AdapterRef]:
        """Give `name` a new generation of the same bytes, `generation` or a later one.

        Returns the old and the new version.

        Raises:
            AdapterNotFoundError: it stands for nothing now.
        """
        old = self._current_ref(name)
        version = self._versions[old]
        self.raise_generation(name, max(old.generation + 1, generation))
        return old, self._publish(name, version.facts, version.pinned)

    def restore(self, info: AdapterInfo) -> AdapterRef:
        """Make a free name stand for a version that an earlier engine's registry had."""
        assert info.name not in self._current, f"{info.name} stands for something already"
        if info.generation:
            self.raise_generation(info.name, info.generation)
        digest = bytes.fromhex(info.digest)
        facts = AdapterCheckpoint(
            path=info.path,
            digest=digest,
            rank=info.rank,
            num_bytes=info.num_bytes,
            base_model=info.base_model,
            invocation_tokens=info.invocation_tokens,
        )
        ref = self._publish(info.name, facts, info.pinned)
        self._versions[ref].created = info.created
        return ref

    def raise_generation(self, name: str, generation: int) -> None:
        """Let `name` have at least this generation from its next version on."""
        self._generations[name] = max(generation, self._generations.get(name, 0))

    # ── leases ──────────────────────────────────────────────────────────────────────────────

    def acquire(self, name: str) -> AdapterRef:
        """Lease the version that `name` stands for; every lease ends in one `release`.

        Raises:
            AdapterNotFoundError: it stands for nothing.
        """
        ref = self._current.get(name)
        if ref is None:
            remedy = f" {ASK_FOR_BASE_MODEL}, or load this adapter first."
            raise AdapterNotFoundError.of_model(name, self._current, remedy)
        self._add_leases(ref, 1)
        return ref

    def release(self, ref: AdapterRef) -> None:
        self._add_leases(ref, -1)
        self._forget_if_unused(ref)

    # ── lookups ─────────────────────────────────────────────────────────────────────────────

    def get(self, name: str) -> AdapterRef | None:
        """The version that `name` stands for, without a lease on it."""
        return self._current.get(name)

    def use_of(self, digest: bytes) -> DigestUse | None:
        """How these bytes are used; None if no version has them."""
        return self._uses.get(digest)

    def path(self, ref: AdapterRef) -> str:
        """Where a version that is current or leased was last read."""
        return self._versions[ref].facts.path

    def invocation_tokens(self, ref: AdapterRef) -> tuple[int, ...]:
        """The invocation tokens of a version that is current or leased."""
        return self._versions[ref].facts.invocation_tokens

    @property
    def paths(self) -> tuple[str, ...]:
        """Where the versions were last read that are current or leased."""
        return tuple({version.facts.path for version in self._versions.values()})

    def info(self, ref: AdapterRef, *, is_resident: bool) -> AdapterInfo:
        """Describe a version that is current or leased."""
        version = self._versions[ref]
        return adapter_info(
            ref,
            version.facts,
            is_resident=is_resident,
            pinned=version.pinned,
            num_leases=version.num_leases,
            created=version.created,
        )

    @property
    def current_refs(self) -> Iterable[AdapterRef]:
        """The names' versions, in the order in which the names were first published."""
        return self._current.values()

    # ── state ───────────────────────────────────────────────────────────────────────────────

    def _current_ref(self, name: str) -> AdapterRef:
        ref = self._current.get(name)
        if ref is None:
            raise AdapterNotFoundError(
                f"The lora adapter '{name}' cannot be found. /v1/models lists those that are "
                "loaded.",
                "lora_name",
            )
        return ref

    def _publish(self, name: str, facts: AdapterCheckpoint, pinned: bool) -> AdapterRef:
        ref = AdapterRef(name, facts.digest, self._generations.get(name, 0))
        old = self._current.get(name)
        if old != ref:
            self._set_current(name, ref)
            self._make_current(ref, facts)
            if old is not None:
                self._retire(old)
        version = self._versions[ref]
        version.facts = facts
        self._uses[ref.digest].num_pinned += pinned - version.pinned
        version.pinned = pinned
        return ref

    def _set_current(self, name: str, ref: AdapterRef | None) -> None:
        if ref is None:
            del self._current[name]
        else:
            self._current[name] = ref
        for changed in self.watchers:
            changed(name, ref)

    def _make_current(self, ref: AdapterRef, facts: AdapterCheckpoint) -> None:
        use = self._uses.setdefault(ref.digest, DigestUse())
        version = self._versions.get(ref)
        if version is None:
            version = self._versions[ref] = _Version(facts, self._clock())
            use.num_versions += 1
        version.is_current = True
        use.num_superseded_leases -= version.num_leases

    def _retire(self, ref: AdapterRef) -> None:
        """Note that its name no longer stands for this version."""
        version, use = self._versions[ref], self._uses[ref.digest]
        use.num_pinned -= version.pinned
        use.num_superseded_leases += version.num_leases
        version.is_current = version.pinned = False
        self._forget_if_unused(ref)

    def _add_leases(self, ref: AdapterRef, change: int) -> None:
        version, use = self._versions[ref], self._uses[ref.digest]
        version.num_leases += change
        assert version.num_leases >= 0, f"{ref.name} was released more often than acquired"
        use.num_leases += change
        if not version.is_current:
            use.num_superseded_leases += change

    def _forget_if_unused(self, ref: AdapterRef) -> None:
        version = self._versions[ref]
        if version.is_current or version.num_leases:
            return
        del self._versions[ref]
        use = self._uses[ref.digest]
        use.num_versions -= 1
        if use.num_versions == 0:
            del self._uses[ref.digest]

    def check_invariants(self) -> None:
        """Assert what must hold after every operation."""
        uses: dict[bytes, DigestUse] = {}
        for ref, version in self._versions.items():
            assert version.is_current == (self._current.get(ref.name) == ref), f"{ref.name} current"
            assert version.is_current or version.num_leases > 0, f"{ref.name} is kept without need"
            assert version.is_current or not version.pinned, f"{ref.name} is pinned but superseded"
            assert ref.generation <= self._generations.get(ref.name, 0), f"{ref.name} is ahead"
            use = uses.setdefault(ref.digest, DigestUse())
            use.num_versions += 1
            use.num_pinned += version.pinned
            use.num_leases += version.num_leases
            use.num_superseded_leases += 0 if version.is_current else version.num_leases
        assert uses == self._uses, "the sums over versions are wrong"
        assert set(self._current.values()) <= set(self._versions), "a name stands for no version"
