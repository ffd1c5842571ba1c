"""What the tiers and their callers exchange: namespaces, records, results and figures.

Blocks are opaque bytes here. Nothing in this package knows requests, tokens or tensors, and no
fault of a tier reaches a caller as an exception: it is a miss, and a count by tier and cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypeAlias

from lora_serve.engine_stats import TierContents, TierFigures
from lora_serve.identity import EVERYTHING, BlockHash, Everything

Buffer: TypeAlias = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class TierNamespace:
    """One prefix-cache namespace as the tiers know it. Only `root` decides which KV is shared.

    root: the root of the hash chain, which all other fields but the layout have entered.
    model: fingerprint of the model. lora_name: BASE_MODEL_NAME for the base.
    digest, generation: the adapter's version; b"" and 0 for the base model.
    salt_digest: SHA-256 of the cache salt, b"" without one; never the salt itself.
    layout: fingerprint of how a block's bytes are laid out (dtype, block size, kernels, layers).
    block_bytes: size of every block.
    """

    root: bytes
    model: bytes
    lora_name: str
    digest: bytes
    generation: int
    salt_digest: bytes
    layout: bytes
    block_bytes: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Which KV of one model to forget: that of one adapter ("": the base model), or EVERYTHING.

    model: fingerprint of the model; what servers of other models have stored stays.
    keep: (digest, generation) of the adapter's version whose KV stays.
    """

    model: bytes
    lora_name: str | Everything = EVERYTHING
    keep: tuple[bytes, int] | None = None

    def takes(self, namespace: TierNamespace) -> bool:
        if namespace.model != self.model:
            return False
        if self.lora_name is EVERYTHING:
            return True
        is_kept = (namespace.digest, namespace.generation) == self.keep
        return namespace.lora_name == self.lora_name and not is_kept


class Cause(StrEnum):
    """Why a block was not loaded, or not saved."""

    ABSENT = "absent"
    DEADLINE = "deadline"
    BREAKER = "breaker_open"
    ERROR = "error"
    QUEUE_FULL = "queue_full"
    # the record was there, and was refused (codec.py)
    TRUNCATED = "truncated"
    FOREIGN = "foreign"
    VERSION = "version"
    LAYOUT = "layout"
    SWAPPED = "swapped"
    CHECKSUM = "checksum"
    KEY = "key"  # it has no MAC, or one by a key that this server lacks; or this one has no keys
    MAC = "mac"  # the checksum is right and the MAC is wrong: it was forged

    @property
    def is_refusal(self) -> bool:
        return self not in (
            Cause.ABSENT,
            Cause.DEADLINE,
            Cause.BREAKER,
            Cause.ERROR,
            Cause.QUEUE_FULL,
        )


@dataclass(frozen=True, slots=True)
class Record:
    """One block as every tier keeps it: `header` as codec.py writes it, and the block's bytes."""

    block_hash: BlockHash
    header: bytes
    payload: Buffer

    @property
    def num_bytes(self) -> int:
        return len(self.header) + len(self.payload)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of a load: verified records of the first blocks asked for.

    cause: why the run ended there; None if it has not ended, and the rest may be asked for.
    """

    records: tuple[Record, ...] = ()
    cause: Cause | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TierTraits:
    """How the store is to use a tier.

    num_readers: threads that load from it. linger_seconds: how long a batch that is to be saved may
    wait for more. takes_promoted: what the tiers behind it gave is put into it, if it is the first.
    """

    num_readers: int = 2
    linger_seconds: float = 1.0
    takes_promoted: bool = False


class TierWatcher(Protocol):
    """Hears what enters and leaves tiers, from any thread, in the order in which it happens."""

    def stored(self, tier: str, namespace: TierNamespace, hashes: Sequence[BlockHash]) -> None:
        """This process has put these blocks into the tier."""

    def already_stored(self, tier: str, hashes: Sequence[BlockHash]) -> None:
        """These blocks were offered to the tier, and were there when it was looked."""

    def removed(self, tier: str, hashes: Sequence[BlockHash]) -> None:
        """These blocks are in the tier no more, whichever server stored them."""

    def dropped(self, tier: str, drop: Drop) -> None:
        """The tier has forgotten what `drop` takes."""


class Tier(Protocol):
    """One place for records. Threads of the store call it; `holds` and `may_hold` any thread.

    `load`, `save`, `touch` and `drop` raise TierError when the tier cannot be used now.
    """

    @property
    def name(self) -> str:
        """Its name in results and figures."""

    @property
    def traits(self) -> TierTraits: ...

    def holds(self, namespace: TierNamespace, block_hash: BlockHash) -> bool:
        """Whether this block is known to be here. Looks into memory only, never waits."""

    def may_hold(self, namespace: TierNamespace, block_hash: BlockHash) -> bool:
        """Whether a load is worth trying: the block is here, or that is not known. Never waits."""

    def load(self, namespace: TierNamespace, hashes: Sequence[BlockHash]) -> Loaded:
        """Load records of the first blocks of `hashes`; at most what one I/O should bring.

        A record that is refused (codec.py) ends the run, and is never found again.
        """

    def save(self, namespace: TierNamespace, records: Sequence[Record]) -> int:
        """Keep records, each once, in the order of the chain; returns how many were new."""

    def touch(self, namespace: TierNamespace, hashes: Sequence[BlockHash]) -> None:
        """Count these blocks as used: others are evicted before them."""

    def drop(self, drop: Drop) -> None:
        """Forget the namespaces that `drop` takes, for good, even if this process is killed now."""

    def watch(self, watcher: TierWatcher) -> None:
        """Tell `watcher` of every block that is saved, or is known to be gone, from now on."""

    def contents(self) -> TierContents: ...

    def close(self) -> None: ...


class TierError(Exception):
    """A tier cannot be used now: its disk is full or gone, its server down, slow or full."""


@dataclass(frozen=True, slots=True)
class FetchResult:
    """The result of a fetch.

    blocks: the longest run of blocks from the first hash asked for; empty for a miss.
    num_blocks_by_tier: from which tiers they came, by their names.
    causes: why each tier that was asked in vain had no more; empty when all blocks came.
    """

    ticket: int
    blocks: tuple[memoryview, ...] = ()
    num_blocks_by_tier: Mapping[str, int] = field(default_factory=dict)
    causes: Mapping[str, Cause] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TierStats:
    """All tiers, in the order in which they are asked; and fetches that ended at their deadline."""

    tiers: tuple[TierFigures, ...] = ()
    num_late: int = 0
