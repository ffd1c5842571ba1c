"""The oracle's draft model: its KV is a hash of all tokens before, in blocks of its own.

It draws what the served model draws without an adapter, so it is right where nothing else decides.
What it reads through blocks that are not one text makes it guess what no text leads to.
"""

from __future__ import annotations

from collections.abc import Sequence

from lora_serve.fuzz.oracle.content import (
    BROKEN,
    UNWRITTEN,
    drawn_token,
    next_content,
    start_content,
)
from lora_serve.model_info import DraftModelInfo
from lora_serve.step import DraftChunk, num_same

NUM_GROUPS = 2  # of its own layers
MAX_MODEL_LEN = 140

Contents = tuple[bytes, ...]  # one for each group of the served model


def oracle_draft_model(num_blocks: int, block_size: int) -> DraftModelInfo:
    return DraftModelInfo(num_blocks, block_size, NUM_GROUPS, MAX_MODEL_LEN)


class OracleDraftModel:
    """num_served_groups: of the model that is served, whose draws hang on all of them."""

    def __init__(self, block_size: int, num_served_groups: int) -> None:
        self._block_size = block_size
        self._num_served_groups = num_served_groups
        # Of a page and a place in it: the contents there, and those before its block.
        self._slots: dict[tuple[int, int], tuple[Contents, Contents]] = {}

    def guess(self, chunk: DraftChunk, drawn: Sequence[int]) -> tuple[int, ...]:
        """drawn: as `DraftChunk` says."""
        tokens, position = list(chunk.token_ids), chunk.start
        if chunk.num_drafts:
            num_right = min(num_same(drawn, chunk.fed), len(drawn) - 1)
            position += num_right
            tokens += drawn[num_right:]
        contents, before_block = self._read(chunk, position)
        drafts: list[int] = []
        while tokens:
            contents, before_block = self._write(
                chunk, position, tokens.pop(0), contents, before_block
            )
            position += 1
            if not tokens and len(drafts) < chunk.num_drafts:
                drafts.append(drawn_token(contents))
                if len(drafts) < chunk.num_drafts:
                    tokens.append(drafts[-1])
        return tuple(drafts)

    def _write(
        self,
        chunk: DraftChunk,
        position: int,
        token_id: int,
        contents: Contents,
        before_block: Contents,
    ) -> tuple[Contents, Contents]:
        """Write the KV of a token; what the next one follows."""
        if position % self._block_size == 0:
            before_block = contents
        contents = tuple(next_content(content, token_id, b"", b"") for content in contents)
        for page, place in self._places(chunk, position):
            self._slots[page, place] = contents, before_block
        return contents, before_block

    def _read(self, chunk: DraftChunk, num_tokens: int) -> tuple[Contents, Contents]:
        """What so many tokens lead to, and what those before the last one's block do."""
        size = self._block_size
        contents = before_block = _start(self._num_served_groups)
        broken = (BROKEN,) * self._num_served_groups
        nothing = (UNWRITTEN,) * self._num_served_groups
        seen = (*range(size - 1, num_tokens - 1, size), num_tokens - 1) if num_tokens else ()
        for position in seen:
            slots = {
                self._slots.get(place, (nothing, nothing))
                for place in self._places(chunk, position)
            }
            found, before = slots.pop()
            if slots or before != contents:
                return broken, broken
            contents, before_block = found, before
        return contents, before_block

    def _places(self, chunk: DraftChunk, position: int) -> list[tuple[int, int]]:
        """The slot of a position in each of its own groups."""
        assert len(chunk.block_tables) == NUM_GROUPS, "a group has no block table"
        block, place = divmod(position, self._block_size)
        return [(table[block], place) for table in chunk.block_tables]


def lone_guesses(text: Sequence[int], num_drafts: int, num_served_groups: int) -> list[int]:
    """What the draft model, alone with a text, guesses to follow it."""
    contents, tokens, drafts = _start(num_served_groups), list(text), list[int]()
    for _ in range(num_drafts):
        for token_id in tokens:
            contents = tuple(next_content(content, token_id, b"", b"") for content in contents)
        drafts.append(drawn_token(contents))
        tokens = drafts[-1:]
    return drafts


def _start(num_groups: int) -> Contents:
    return tuple(map(start_content, range(num_groups)))
