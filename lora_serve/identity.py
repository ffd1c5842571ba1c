"""What a KV block is found by: everything that shaped it, and nothing else.

    root(namespace) = H("lora-serve/kv/1", model fingerprint, lora_name, digest, generation, salt)
    h[i]            = H(h[i-1], token ids of block i, digest of its embedding rows, activation)

Where an adapter acts from a later position s on, the blocks before that of s are the base model's:
their chain begins at its root, and `activation` of the block that s is in says which adapter it is,
and s; it is empty of any other.

H hashes length-framed fields, so ("ab", "c") and ("a", "bc") differ, and takes no random seed, so
it is equal in every process. One chain serves the device cache and every tier.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NewType

import xxhash

BlockHash = NewType("BlockHash", bytes)

_SCHEME = b"lora-serve/kv/1"


class NoAdapter(Enum):
    """What stands in the place of an adapter or its name where the base model answers."""

    BASE_MODEL = 0


class Everything(Enum):
    """What stands in the place of a name where the base model and all adapters are meant."""

    EVERYTHING = 0


BASE_MODEL: Final = NoAdapter.BASE_MODEL
EVERYTHING: Final = Everything.EVERYTHING
BASE_MODEL_NAME: Final = ""  # BASE_MODEL as a text: in stored KV, and among shares


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """One version of an adapter. Requests hold this, never a name.

    digest is over the bytes that were loaded, so equal bytes are one version wherever they lie.
    generation is raised when KV of this name must no longer be trusted.
    """

    name: str
    digest: bytes
    generation: int = 0


@dataclass(frozen=True, slots=True)
class CacheNamespace:
    """All that requests which share KV have in common: model, adapter version, salt."""

    model_fingerprint: bytes
    adapter: AdapterRef | NoAdapter = BASE_MODEL
    cache_salt: str = ""

    @property
    def lora_name(self) -> str | NoAdapter:
        return self.adapter if self.adapter is BASE_MODEL else self.adapter.name

    @property
    def of_base_model(self) -> CacheNamespace:
        """The namespace of the base model's requests with the same salt."""
        return CacheNamespace(self.model_fingerprint, BASE_MODEL, self.cache_salt)


@dataclass(frozen=True, slots=True)
class Activation:
    """An adapter begins to act at `start`, which is not 0. namespace: of what is computed then."""

    namespace: CacheNamespace
    start: int

    @property
    def framed(self) -> bytes:
        return framed(str(self.start).encode(), *_adapter_fields(self.namespace.adapter))


def framed(*fields: bytes) -> bytes:
    """Join fields so that no two different tuples give the same bytes."""
    return b"".join(len(field).to_bytes(8, "little") + field for field in fields)


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _xxh3_128(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


HASH_ALGOS: dict[str, Callable[[bytes], bytes]] = {"sha256": _sha256, "xxh3_128": _xxh3_128}


class BlockHasher:
    """The chain above, with the hash function that `--prefix-caching-hash-algo` names."""

    def __init__(self, algo: str = "sha256") -> None:
        self._hash = HASH_ALGOS[algo]

    def root(self, namespace: CacheNamespace) -> BlockHash:
        salt = _salt_bytes(namespace.cache_salt)
        adapter = framed(*_adapter_fields(namespace.adapter))
        return BlockHash(self._hash(framed(_SCHEME, namespace.model_fingerprint, adapter, salt)))

    def extend(
        self,
        parent: BlockHash,
        token_ids: Sequence[int],
        embeds_digest: bytes = b"",
        activation: Activation | None = None,
    ) -> BlockHash:
        """Hash of the block after `parent`.

        Args:
            parent: hash of the block before, or the root.
            token_ids: the block's tokens; 0 where an embedding row stands instead.
            embeds_digest: digest of the block's embedding rows, empty if it has none.
            activation: of the adapter that begins to act in the block, if one does.
        """
        tokens = array("q", token_ids).tobytes()
        begins = b"" if activation is None else activation.framed
        return BlockHash(self._hash(framed(parent, tokens, embeds_digest, begins)))


def embeds_digest(rows: bytes | memoryview) -> bytes:
    """Digest of one block's embedding rows, as the model's dtype stores them."""
    return hashlib.sha256(rows).digest()


def placed_embeds_digest(rows: bytes | memoryview, places: Sequence[int]) -> bytes:
    """Digest of a block's embedding rows that do not all stand at its beginning.

    places: numbers that say where each row stands. Their bytes and the digest's are never as many
    as rows have, so no rows have this digest as theirs.
    """
    return hashlib.sha256(embeds_digest(rows) + b"at" + array("q", places).tobytes()).digest()


def salt_digest(cache_salt: str) -> bytes:
    """What tiers are told of a salt, by which they find KV of the same one; empty for none."""
    return hashlib.sha256(_salt_bytes(cache_salt)).digest() if cache_salt else b""


def tenant_salt(api_key: str, cache_salt: str) -> str:
    """Mix a tenant's own salt with the one a client asked for: it adds to it, never replaces it."""
    fields = framed(b"tenant", api_key.encode(), _salt_bytes(cache_salt))
    return hashlib.sha256(fields).hexdigest()


def _adapter_fields(adapter: AdapterRef | NoAdapter) -> tuple[bytes, ...]:
    if adapter is BASE_MODEL:
        return (b"base",)
    return (b"adapter", adapter.name.encode(), adapter.digest, str(adapter.generation).encode())


def _salt_bytes(cache_salt: str) -> bytes:
    return cache_salt.encode("utf-8", "surrogatepass")  # a salt is any string that JSON can hold
