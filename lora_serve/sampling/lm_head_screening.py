"""LM-head screening: tokens, greedy or drawn, found without computing all logits.

The one rule: it answers what all logits would have answered, or nothing. A greedy step reads the LM
head only to find its largest product, and one that draws with a filter, or at a low temperature, to
find a few large ones. `Ops.pack_screen` makes a kernel that finds them by reading a copy of half
the size, and the few rows which that leaves in question; or, where grammars allow few tokens, their
rows alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from lora_serve.ops.contract import Ops, PackedLinear, Screen, ScreenedArgmax, ScreenedTokens
from lora_serve.sampling.contract import SamplerOutput
from lora_serve.sampling.host import HostSamplerOutput, token_choice
from lora_serve.step import SampleInput

LEAST_SCREENED_BYTES = 16 << 20  # smaller LM heads lie in a cache anyway

_MOST_ROWS = 64  # with more the products themselves take longer than reading the LM head
_MOST_DRAWN_ROWS = 4  # each has a few hundred panels in question, not one or two
_MOST_LEFT_OUT = 64


class LMHeadScreening:
    """Where hidden states leave too much in question it is asked less and less often.

    tokens: draws, too, where it is `ScreenedTokens`.
    """

    def __init__(self, tokens: ScreenedArgmax) -> None:
        self._tokens = tokens
        self._greedy_turns, self._drawing_turns = _Turns(), _Turns()

    def sample(self, hidden: Tensor, inputs: Sequence[SampleInput]) -> SamplerOutput | None:
        """A token of each hidden state (N, H), or None where all logits are needed."""
        bitmasks: list[bytes | None] = [item.bitmask for item in inputs]
        if all(mask is None for mask in bitmasks):
            bitmasks = []
        if all(item.is_screenable for item in inputs):
            tokens = self._find(hidden, bitmasks)
        elif all(item.asks_for_a_token_alone for item in inputs):
            tokens = self._draw(hidden, bitmasks, inputs)
        else:
            return None
        return None if tokens is None else HostSamplerOutput([(token, None) for token in tokens])

    def _find(self, hidden: Tensor, bitmasks: Sequence[bytes | None]) -> list[int] | None:
        if len(hidden) > _MOST_ROWS:
            return None
        return self._greedy_turns.ask(lambda: self._tokens(hidden, bitmasks))

    def _draw(
        self, hidden: Tensor, bitmasks: Sequence[bytes | None], inputs: Sequence[SampleInput]
    ) -> list[int] | None:
        screen = self._tokens
        if len(hidden) > _MOST_DRAWN_ROWS or not isinstance(screen, ScreenedTokens):
            return None
        choices = [token_choice(item) for item in inputs]
        return self._drawing_turns.ask(lambda: screen.draw(hidden, bitmasks, choices))


class _Turns:
    """Leaves out twice as many steps each time that something was left in question."""

    def __init__(self) -> None:
        self._left_out = 0  # how many steps are still to be left out
        self._next_left_out = 1

    def ask(self, find: Callable[[], list[int]]) -> list[int] | None:
        """What is found; None if any row is in question, or is left out."""
        if self._left_out > 0:
            self._left_out -= 1
            return None
        tokens = find()
        if min(tokens) >= 0:
            self._next_left_out = 1
            return tokens
        self._left_out = self._next_left_out
        self._next_left_out = min(2 * self._next_left_out, _MOST_LEFT_OUT)
        return None


def with_screening(ops: Ops, setting: str, least_bytes: int = LEAST_SCREENED_BYTES) -> Ops:
    """`ops` that screen LM heads as --lm-head-screen asks.

    Args:
        ops: the specification of sampling screens nothing, whatever backend multiplies.
        setting: "on", "off", or "auto": LM heads of at least least_bytes.
    """
    pack_screen = ops.pack_screen
    if pack_screen is None or setting == "off" or ops.runtime.backend == "reference":
        return replace(ops, pack_screen=None)
    if setting == "on":
        return ops

    def pack(weight: Tensor, packed: PackedLinear) -> Screen | None:
        return pack_screen(weight, packed) if weight.nbytes >= least_bytes else None

    return replace(ops, pack_screen=pack)
