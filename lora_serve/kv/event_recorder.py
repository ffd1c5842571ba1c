"""What consumers of KV events are told: exactly the blocks that a new request would find here.

A consumer knows a block by an adapter's name and its tokens, and knows no versions. So of each name
only the blocks of the version that it stands for are told of. When it comes to stand for another,
those of the old one are taken back before anything of the new one is told; they stay cached, are
known here, and are told of again if the name goes back.

What a step costs grows with the blocks that it commits and reuses. A change of what a name stands
for costs what is cached of that name.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from lora_serve.identity import (
    BASE_MODEL,
    AdapterRef,
    BlockHash,
    CacheNamespace,
    salt_digest,
)
from lora_serve.kv.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    Medium,
    Namespace,
)
from lora_serve.kv.tier_copies import Copy, TierCopies, Version

Place = tuple[BlockHash, int]  # of a device block: its hash and its group

_TIER_MEDIA = (Medium.CPU, Medium.STORAGE)
_TAG_DIGITS = 32  # half of what a SHA-256 has: consumers take 64 for the digest of an image


class CommittedRequest(Protocol):
    """The part of a request that events are made of."""

    block_hashes: list[BlockHash]
    token_ids: list[int]
    embeds_digests: tuple[bytes, ...]

    def namespace_of(self, block: int) -> CacheNamespace: ...


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of the device that can be found. The tokens are packed: there may be millions."""

    parent: BlockHash | None
    token_ids: array[int]
    embeds: str
    salt: str


class KVEventRecorder:
    """Is told of every change of what can be found, and keeps the events until `take`.

    notify: as of `TierCopies`.
    """

    def __init__(
        self, block_size: int, num_groups: int = 1, notify: Callable[[], None] = lambda: None
    ) -> None:
        self._block_size = block_size
        self._num_groups = num_groups
        self._pending: list[KVEvent] = [AllBlocksCleared()]  # what an engine before this one told
        self._device: dict[Version, dict[Place, _Block]] = {}
        self._version_of: dict[Place, Version] = {}
        self._current: dict[str, AdapterRef] = {}
        self._lora_ids: dict[str, int] = {}
        self._num_versions = 0
        self._told_copies: set[Copy] = set()
        self._due: dict[BlockHash, None] = {}  # blocks whose copies are to be told of, if known
        self.tiers = TierCopies(self._appeared_in_tier, self._vanished_from_tier, notify)

    def take(self) -> list[KVEvent]:
        """The events since the last call, in their order."""
        self.tiers.take_in()
        self._tell_copies_due()
        pending, self._pending = self._pending, []
        return pending

    def begin_anew(self) -> None:
        """Tell everything again, to consumers that have missed some of it."""
        self._pending = [AllBlocksCleared()]
        self._told_copies.clear()
        self._tell_all(BASE_MODEL)
        for version in self._current.values():
            self._tell_all(version)

    # ── versions ────────────────────────────────────────────────────────────────────────────

    def name_stands_for(self, name: str, ref: AdapterRef | None) -> None:
        """Take note of the version that a name stands for from now on; None if it was unloaded."""
        old = self._current.pop(name, None)
        if old is not None:
            self._take_back(old)
            del self._lora_ids[name]
        if ref is not None:
            self._num_versions += 1
            self._current[name], self._lora_ids[name] = ref, self._num_versions
            self._tell_all(ref)

    def _is_told(self, version: Version) -> bool:
        return version is BASE_MODEL or self._current.get(version.name) == version

    def _take_back(self, version: Version) -> None:
        self._tell_removed((Medium.GPU, place) for place in self._device.get(version, ()))
        self._vanished_from_tier(self.tiers.of(version))

    def _tell_all(self, version: Version) -> None:
        blocks = self._device.get(version, {})
        for place in _parents_first(blocks):
            self._tell_stored(version, place, blocks[place])

    # ── the device ──────────────────────────────────────────────────────────────────────────

    def stored(self, request: CommittedRequest, index: int, group: int) -> None:
        """Tell that a request's block, at this place of its chain, can be found from now on."""
        namespace, size = request.namespace_of(index), self._block_size
        version = namespace.adapter
        place = request.block_hashes[index], group
        block = _Block(
            request.block_hashes[index - 1] if index else None,
            array("i", request.token_ids[index * size : (index + 1) * size]),
            _embeds_tag(request.embeds_digests, index),
            _salt_tag(namespace.cache_salt),
        )
        self._device.setdefault(version, {})[place] = block
        self._version_of[place] = version
        if self._is_told(version):
            self._tell_stored(version, place, block)

    def removed(self, block_hash: BlockHash, group: int) -> None:
        """Tell that a block of the device can be found no more."""
        place = block_hash, group
        version = self._version_of.pop(place, None)
        if version is None:
            return  # all were cleared before
        blocks = self._device[version]
        del blocks[place]
        if not blocks:
            del self._device[version]
        if self._is_told(version):
            self._tell_removed([(Medium.GPU, place)])

    def cleared(self) -> None:
        """Tell that no block can be found any more: all are forgotten, in the tiers, too."""
        self._device.clear()
        self._version_of.clear()
        self.tiers.clear()
        self._told_copies.clear()
        self._pending.append(AllBlocksCleared())

    # ── tiers ───────────────────────────────────────────────────────────────────────────────

    def _appeared_in_tier(self, copies: Sequence[Copy]) -> None:
        self._due.update((block_hash, None) for _, block_hash in copies)

    def _vanished_from_tier(self, copies: Sequence[Copy]) -> None:
        gone = [copy for copy in copies if copy in self._told_copies]
        self._told_copies.difference_update(gone)
        self._tell_removed(
            (medium, (block_hash, group))
            for group in range(self._num_groups)
            for medium, block_hash in gone
        )

    def _is_known(self, block_hash: BlockHash) -> bool:
        """Whether consumers have its tokens: they know it on the device, or on another medium."""
        places = ((block_hash, group) for group in range(self._num_groups))
        copies = ((medium, block_hash) for medium in _TIER_MEDIA)
        return any(p in self._version_of for p in places) or any(
            copy in self._told_copies for copy in copies
        )

    def _tell_copies_due(self) -> None:
        """Tell of copies whose blocks consumers know by now: there are no tokens with them."""
        found: dict[tuple[Version, Medium], list[BlockHash]] = {}
        for block_hash in self._due:
            for medium in _TIER_MEDIA:
                copy = medium, block_hash
                version = self.tiers.version_of(copy)
                if version is None or not self._is_told(version) or copy in self._told_copies:
                    continue
                if self._is_known(block_hash):
                    found.setdefault((version, medium), []).append(block_hash)
                    self._told_copies.add(copy)
        self._due = {}
        for (version, medium), hashes in found.items():
            namespace = self._namespace(version, "")
            for group in range(self._num_groups):
                self._pending.append(BlockStored(medium, group, namespace, None, list(hashes)))

    # ── telling ─────────────────────────────────────────────────────────────────────────────

    def _namespace(self, version: Version, salt: str) -> Namespace:
        if version is BASE_MODEL:
            return Namespace(salt=salt)
        return Namespace(version.name, self._lora_ids[version.name], salt)

    def _tell_stored(self, version: Version, place: Place, block: _Block) -> None:
        block_hash, group = place
        namespace = self._namespace(version, block.salt)
        last = self._pending[-1] if self._pending else None
        if not (
            isinstance(last, BlockStored)
            and (last.medium, last.group, last.namespace) == (Medium.GPU, group, namespace)
            and last.block_hashes[-1] == block.parent
        ):
            last = BlockStored(Medium.GPU, group, namespace, block.parent)
            self._pending.append(last)
        last.block_hashes.append(block_hash)
        last.token_ids.extend(block.token_ids)
        last.embeds.append(block.embeds)
        self._due[block_hash] = None

    def _tell_removed(self, gone: Iterable[tuple[Medium, Place]]) -> None:
        for medium, (block_hash, group) in gone:
            last = self._pending[-1] if self._pending else None
            if not (
                isinstance(last, BlockRemoved) and (last.medium, last.group) == (medium, group)
            ):
                last = BlockRemoved(medium, group)
                self._pending.append(last)
            last.block_hashes.append(block_hash)


def _parents_first(blocks: Mapping[Place, _Block]) -> Iterator[Place]:
    """All places, each behind that of its parent if that is among them."""
    seen: set[Place] = set()
    for start in blocks:
        chain: list[Place] = []
        place: Place | None = start
        while place is not None and place in blocks and place not in seen:
            seen.add(place)
            chain.append(place)
            parent = blocks[place].parent
            place = None if parent is None else (parent, place[1])
        yield from reversed(chain)


def _embeds_tag(digests: Sequence[bytes], index: int) -> str:
    digest = digests[index] if index < len(digests) else b""
    return f"embeds:{digest.hex()[:_TAG_DIGITS]}" if digest else ""


def _salt_tag(cache_salt: str) -> str:
    return f"salt:{salt_digest(cache_salt).hex()[:_TAG_DIGITS]}" if cache_salt else ""
