"""Which replicas were lately sent which prefixes. Knows no replica's state, and no text.

A prefix is known by hashes of its beginnings, so what is kept does not grow with the text, and a
hash is looked up whole: no prefix is compared with others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import xxhash

CHUNK_BYTES = 256  # of text about 64 tokens: four blocks of the default size
MAX_CHUNKS = 128  # of a longer prompt the rest has no part in the choice
REPLICAS_PER_PREFIX = 4


def prefix_hashes(text: bytes, chunk_bytes: int = CHUNK_BYTES) -> tuple[bytes, ...]:
    """One hash for each beginning of `text` that is a whole number of chunks, the shortest first.

    Equal beginnings have equal hashes in every process. What lies beyond MAX_CHUNKS is not read.
    """
    num_chunks = min(len(text) // chunk_bytes, MAX_CHUNKS)
    view = memoryview(text)
    running = xxhash.xxh3_128()
    hashes = []
    for start in range(0, num_chunks * chunk_bytes, chunk_bytes):
        running.update(view[start : start + chunk_bytes])
        hashes.append(running.digest())
    return tuple(hashes)


class PrefixMemory:
    """The prefixes that were sent last, and for each the replicas that were sent it last."""

    def __init__(self, max_prefixes: int) -> None:
        self._max_prefixes = max_prefixes
        self._replicas: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()  # oldest first

    def __len__(self) -> int:
        return len(self._replicas)

    def replicas(self, prefix: bytes) -> tuple[str, ...]:
        """The replicas that were sent this very prefix, the last one first."""
        return self._replicas.get(prefix, ())

    def lengths(self, root: bytes, hashes: Sequence[bytes]) -> dict[str, int]:
        """How many chunks of a prompt each replica was sent before, without a gap.

        Args:
            root: what must be equal besides the text.
            hashes: from `prefix_hashes`.
        """
        lengths: dict[str, int] = {}
        for depth, prefix in enumerate(_keys(root, hashes)):
            found = self._replicas.get(prefix)
            if found is None:
                break
            for replica_id in found:
                if lengths.get(replica_id, 0) == depth:
                    lengths[replica_id] = depth + 1
        return lengths

    def note(self, root: bytes, hashes: Sequence[bytes], replica_id: str) -> None:
        """Remember that a replica is sent `root` with a text, and all its beginnings."""
        keys = (root, *_keys(root, hashes))
        for prefix in reversed(keys):  # the head last: it must not be forgotten before its tail
            others = (each for each in self._replicas.get(prefix, ()) if each != replica_id)
            self._replicas[prefix] = (replica_id, *others)[:REPLICAS_PER_PREFIX]
            self._replicas.move_to_end(prefix)
        while len(self._replicas) > self._max_prefixes:
            self._replicas.popitem(last=False)


def _keys(root: bytes, hashes: Sequence[bytes]) -> Iterator[bytes]:
    return (root + each for each in hashes)
