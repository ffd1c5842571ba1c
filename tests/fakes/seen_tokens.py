"""What penalties are given, made of whole lists of tokens."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from lora_serve.step import SampleInput, SeenTokens


def seen_tokens(prompt: Sequence[int], answer: Sequence[int]) -> SeenTokens:
    drawn = Counter(answer)
    token_ids = array("i", {*prompt, *answer})
    return SeenTokens(token_ids, array("i", [drawn[token_id] for token_id in token_ids]))


def counted(item: SampleInput, token_id: int) -> SampleInput:
    """The item with one more token in its answer; -1 is none."""
    return item if token_id < 0 else replace(item, seen=item.seen.and_drawn(token_id))
