"""LM-head screening: greedy tokens, found without computing all logits.

The one rule: it answers what all logits would have answered, or nothing. A greedy step reads the LM
head only to find its largest product; `Ops.pack_screen` makes a kernel that finds it by reading a
copy of half the size, and the few rows which that leaves in question; or, where grammars allow few
tokens, their rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from lora_serve.ops.contract import Ops, PackedLinear, Screen, ScreenedArgmax
from lora_serve.sampling.contract import SamplerOutput
from lora_serve.sampling.host import HostSamplerOutput
from lora_serve.step import SampleInput

LEAST_SCREENED_BYTES = 16 << 20  # smaller LM heads lie in a cache anyway

_MOST_ROWS = 64  # with more the products themselves take longer than reading the LM head
_MOST_LEFT_OUT = 64


class LMHeadScreening:
    """Where hidden states leave too much in question it is asked less and less often."""

    def __init__(self, argmax: ScreenedArgmax) -> None:
        self._argmax = argmax
        self._left_out = 0  # how many steps are still to be left out
        self._next_left_out = 1

    def sample(self, hidden: Tensor, inputs: Sequence[SampleInput]) -> SamplerOutput | None:
        """A token of each hidden state (N, H), or None where all logits are needed."""
        if not all(item.is_screenable for item in inputs):
            return None
        bitmasks = [item.bitmask for item in inputs]
        tokens = self._find(hidden, bitmasks if any(mask is not None for mask in bitmasks) else ())
        return None if tokens is None else HostSamplerOutput([(token, None) for token in tokens])

    def _find(self, hidden: Tensor, bitmasks: Sequence[bytes | None]) -> list[int] | None:
        """None if any row is in question."""
        if len(hidden) > _MOST_ROWS:
            return None
        if self._left_out > 0:
            self._left_out -= 1
            return None
        tokens = self._argmax(hidden, bitmasks)
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
