"""How much of one answer's reasoning is left, where a request bounds it."""

from __future__ import annotations

from lora_serve.bitmask import bitmask_of_one
from lora_serve.structured_outputs import ReasoningTokens


class Thinking:
    """Counts the tokens between the markers. When none is left, the end's marker must follow."""

    def __init__(self, markers: ReasoningTokens, budget: int) -> None:
        """budget: how many tokens the reasoning may have, without its markers."""
        self._markers = markers
        self._num_left = budget
        self._is_open = markers.is_open
        self.is_over = False

    @property
    def must_end(self) -> bool:
        """Whether the next token is the marker that ends the reasoning, and no other."""
        return self._is_open and self._num_left == 0

    @property
    def only_end(self) -> bytes:
        """The mask that allows that token alone."""
        return bitmask_of_one(self._markers.end)

    def hangs_on(self, num_pending: int) -> bool:
        """Whether `must_end` may be another once so many more tokens are known."""
        if self.is_over or not num_pending:
            return False
        num_thought = num_pending if self._is_open else num_pending - 1
        return num_thought >= self._num_left

    def drew(self, token_id: int) -> None:
        """Take in the answer's next token."""
        if self.is_over:
            return
        if not self._is_open:  # the answer's first token begins it, or there is none
            self._is_open = token_id == self._markers.start
            self.is_over = not self._is_open
        elif token_id == self._markers.end:
            self._is_open, self.is_over = False, True
        else:
            self._num_left -= 1
