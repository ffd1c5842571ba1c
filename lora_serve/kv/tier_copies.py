"""The blocks that this engine has put into its tiers and that are still there, by version.

Tiers report from their threads, in the order in which it happens; the engine's thread takes their
reports in between two steps. What is about to be dropped counts as gone from the moment at which
that is decided, and so does what is still being saved of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue

from lora_serve.identity import BASE_MODEL, BASE_MODEL_NAME, AdapterRef, BlockHash, NoAdapter
from lora_serve.kv.events import Medium
from lora_serve.kv_tiers.base import Drop, TierNamespace

Version = AdapterRef | NoAdapter
Copy = tuple[Medium, BlockHash]

MEMORY_TIERS = frozenset({"ram"})  # others may be looked into by other replicas


@dataclass(slots=True, eq=False)
class _Copies:
    """The copies of one version. tiers: by copy, the tiers of that medium with it; never none."""

    namespace: TierNamespace  # one of the version's; they differ in their salts
    tiers: dict[Copy, set[str]] = field(default_factory=dict)


class TierCopies:
    """A `TierWatcher`. `appeared` and `vanished` are told of each change, in `take_in`'s thread."""

    def __init__(
        self,
        appeared: Callable[[Sequence[Copy]], None],
        vanished: Callable[[Sequence[Copy]], None],
        notify: Callable[[], None],
    ) -> None:
        """`notify` is called from the tiers' threads when there is something to take in."""
        self._appeared = appeared
        self._vanished = vanished
        self._notify = notify
        self._reports: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._by_version: dict[Version, _Copies] = {}
        self._version_of: dict[Copy, Version] = {}
        self._dropping: list[tuple[Drop, set[str]]] = []  # with the tiers that have yet to do it

    # ── from any thread ─────────────────────────────────────────────────────────────────────

    def stored(self, tier: str, namespace: TierNamespace, hashes: Sequence[BlockHash]) -> None:
        self._report(partial(self._stored, tier, namespace, tuple(hashes)))

    def already_stored(self, tier: str, hashes: Sequence[BlockHash]) -> None:
        """Nothing: by the time at which that is taken in, a block may be gone."""

    def removed(self, tier: str, hashes: Sequence[BlockHash]) -> None:
        self._report(partial(self._removed, tier, tuple(hashes)))

    def dropped(self, tier: str, drop: Drop) -> None:
        self._report(partial(self._dropped, tier, drop))

    def _report(self, report: Callable[[], None]) -> None:
        self._reports.put(report)
        self._notify()

    # ── from the engine's ───────────────────────────────────────────────────────────────────

    def take_in(self) -> None:
        """Take in what was reported since the last call."""
        while True:
            try:
                report = self._reports.get_nowait()
            except Empty:
                return
            report()

    def dropping(self, drop: Drop, tiers: Sequence[str]) -> None:
        """Forget the copies that `drop` takes: none of these tiers gives them from now on."""
        self.take_in()
        self._dropping.append((drop, set(tiers)))
        for version, copies in list(self._by_version.items()):
            if drop.takes(copies.namespace):
                self._forget(version, list(copies.tiers))

    def clear(self) -> None:
        """Forget all copies, of which `dropping` is about to be told; nothing has vanished yet."""
        self.take_in()
        self._by_version.clear()
        self._version_of.clear()

    def version_of(self, copy: Copy) -> Version | None:
        """Whose copy that is; None if it is in no tier."""
        return self._version_of.get(copy)

    def of(self, version: Version) -> list[Copy]:
        """All copies of a version."""
        copies = self._by_version.get(version)
        return [] if copies is None else list(copies.tiers)

    def _stored(self, tier: str, namespace: TierNamespace, hashes: Sequence[BlockHash]) -> None:
        if any(tier in tiers and drop.takes(namespace) for drop, tiers in self._dropping):
            return  # it is found no more, and goes when the tier comes to the drop
        version = _version(namespace)
        copies = self._by_version.setdefault(version, _Copies(namespace))
        new: list[Copy] = []
        for block_hash in hashes:
            copy = _medium(tier), block_hash
            tiers = copies.tiers.setdefault(copy, set())
            if not tiers:
                self._version_of[copy] = version
                new.append(copy)
            tiers.add(tier)
        self._appeared(new)

    def _removed(self, tier: str, hashes: Sequence[BlockHash]) -> None:
        for block_hash in hashes:
            copy = _medium(tier), block_hash
            version = self._version_of.get(copy)
            if version is None:
                continue
            tiers = self._by_version[version].tiers[copy]
            tiers.discard(tier)
            if not tiers:
                self._forget(version, [copy])

    def _dropped(self, tier: str, drop: Drop) -> None:
        for index, (pending, tiers) in enumerate(self._dropping):
            if pending == drop and tier in tiers:
                tiers.discard(tier)
                if not tiers:
                    del self._dropping[index]
                return

    def _forget(self, version: Version, gone: Sequence[Copy]) -> None:
        copies = self._by_version[version].tiers
        for copy in gone:
            del copies[copy], self._version_of[copy]
        if not copies:
            del self._by_version[version]
        self._vanished(gone)


def _version(namespace: TierNamespace) -> Version:
    if namespace.lora_name == BASE_MODEL_NAME:
        return BASE_MODEL
    return AdapterRef(namespace.lora_name, namespace.digest, namespace.generation)


def _medium(tier: str) -> Medium:
    return Medium.CPU if tier in MEMORY_TIERS else Medium.STORAGE
