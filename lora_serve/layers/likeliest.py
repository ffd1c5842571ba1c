"""The likeliest tokens, found without computing all logits.

The one rule: what it answers is what all logits would have answered, or nothing. A greedy step
reads the LM head only to find its largest product; the backend's `greedy` finds it by reading a
copy of half the size, and the few rows which that leaves in question.
"""

from __future__ import annotations

from torch import Tensor

from lora_serve.ops import Ops, PackedLinear, Screen

_MOST_ROWS = 64  # with more the products themselves take longer than reading the LM head
_MOST_LEFT_OUT = 64


class LikeliestTokens:
    """Where hidden states leave too much in question it is asked less and less often."""

    def __init__(self, ops: Ops, packed: PackedLinear, screen: Screen) -> None:
        assert ops.greedy is not None, f"{ops.name} has no greedy"
        self._greedy = ops.greedy
        self._packed = packed
        self._screen = screen
        self._left_out = 0  # how many steps are still to be left out
        self._next_left_out = 1

    @classmethod
    def of(cls, ops: Ops, weight: Tensor, packed: PackedLinear) -> LikeliestTokens | None:
        """weight: (V, H), the LM head. None where the backend does not screen it."""
        if ops.pack_screen is None or ops.greedy is None:
            return None
        screen = ops.pack_screen(weight)
        return None if screen is None else cls(ops, packed, screen)

    def find(self, hidden: Tensor) -> list[int] | None:
        """hidden: (N, H) -> N token ids, or None if any is in question."""
        if len(hidden) > _MOST_ROWS:
            return None
        if self._left_out > 0:
            self._left_out -= 1
            return None
        tokens = self._greedy(hidden, self._packed, self._screen)
        if min(tokens) >= 0:
            self._next_left_out = 1
            return tokens
        self._left_out = self._next_left_out
        self._next_left_out = min(2 * self._next_left_out, _MOST_LEFT_OUT)
        return None
