"""What the oracle's model computes at a position: hashes, and what is drawn from them.

A position's content is a hash of (the content before it, the token, the adapter's digest).
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache

import numpy as np

from lora_serve.step import TokenLogprobs

VOCAB_SIZE = 500
EOS = 7
CONTENT_BYTES = 16
SLOT_BYTES = 2 * CONTENT_BYTES  # its own content, then that before its block
START = b"start".ljust(CONTENT_BYTES)  # what the first position follows
BROKEN = b"no chain".ljust(CONTENT_BYTES)  # what is read through blocks that are not one prefix
UNWRITTEN = b"never written".ljust(SLOT_BYTES)


def start_content(group: int) -> bytes:
    """What the first position follows, in each group another: no block passes for one elsewhere."""
    return START[:-1] + bytes([START[-1] + group])


# Traces hash the same prefixes again and again: once in the engine, and in each lone answer.
@lru_cache(maxsize=2**17)
def next_content(before: bytes, token_id: int, embeds_row: bytes, digest: bytes) -> bytes:
    hashed = hashlib.sha256(before + token_id.to_bytes(4, "little") + embeds_row + b"|" + digest)
    return hashed.digest()[:CONTENT_BYTES]


def drawn_token(contents: Sequence[bytes]) -> int:
    """contents: of the last position, in each group."""
    return sum(int.from_bytes(content[:4], "little") for content in contents) % VOCAB_SIZE


def scored_token(token_id: int, contents: Sequence[bytes]) -> TokenLogprobs:
    """A token's prompt logprob. contents: of the position before it, in each group."""
    return TokenLogprobs(token_id, -float(drawn_token(contents)), 1)


def chosen_token(drawn: int, allowed: Sequence[int] | None, banned: Collection[int] = ()) -> int:
    """The token that is drawn where only some are allowed (None allows all), and some banned."""
    if allowed is None and drawn not in banned:
        return drawn
    left = [*_tokens_left(allowed, banned)]
    return left[drawn % len(left)]


def is_token_left(allowed: Sequence[int] | None, banned: Collection[int]) -> bool:
    return next(_tokens_left(allowed, banned), None) is not None


def _tokens_left(allowed: Sequence[int] | None, banned: Collection[int]) -> Iterator[int]:
    among = range(VOCAB_SIZE) if allowed is None else allowed
    return (token_id for token_id in among if token_id not in banned)


def allowed_tokens(bitmask: bytes) -> list[int]:
    """The tokens that a SampleInput.bitmask allows, ascending."""
    bits = np.unpackbits(np.frombuffer(bitmask, np.uint8), bitorder="little")
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def bad_ends(words: Sequence[tuple[int, ...]], answer: Sequence[int]) -> set[int]:
    """What bad words forbid behind an answer."""
    return {word[-1] for word in words if tuple(answer[len(answer) + 1 - len(word) :]) == word[:-1]}


def hidden_sums(rows: Sequence[Sequence[bytes]]) -> bytes:
    """The sums over the rows' contents, taken as whole numbers."""
    numbers = [np.frombuffer(b"".join(contents), np.uint32) for contents in rows]
    return np.sum(numbers, axis=0, dtype=np.int64).tobytes()
