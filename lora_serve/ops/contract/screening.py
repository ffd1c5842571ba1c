"""What kernels do that find tokens in the outputs of an LM head without computing all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from lora_serve.ops.contract.packed import LinearInT


class ScreenedArgmax(Protocol):
    """Finds the largest outputs of a packed weight without computing all."""

    def __call__(self, x: Tensor, bitmasks: Sequence[bytes | None], /) -> list[int]:
        """Find the first of the largest outputs of each row of x (N, H); -1 where that is open.

        bitmasks: which outputs of each row count, as `SampleInput.bitmask` has it; empty if all do.
        """


class TokenChoice(NamedTuple):
    """How a row's token is chosen, as sampling/specification/draw.py has it.

    scale: 1 / temperature; 0 for greedy, which looks at nothing else.
    seed: in [0, 2**64).
    """

    scale: float = 0.0
    min_p: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    position: int = 0


@runtime_checkable
class ScreenedTokens(ScreenedArgmax, Protocol):
    """A ScreenedArgmax that also draws tokens."""

    def draw(
        self, x: Tensor, bitmasks: Sequence[bytes | None], choices: Sequence[TokenChoice], /
    ) -> list[int]:
        """Choose a token of each row of x (N, H) by its outputs; -1 where all of them are needed.

        choices: N, one for each row.
        """


class Screen(ScreenedArgmax, Protocol):
    """A ScreenedArgmax of a packed weight that also tells how large the found outputs are."""

    def outputs(self, x: Tensor, tokens: Sequence[int], /) -> list[float]:
        """Output tokens[t] of row t of x (N, H), with the bits that `linear` gives it."""


class PackScreen(Protocol[LinearInT]):
    """Makes a kernel that finds the largest output of a packed weight without computing all.

    None where the weight's numbers cannot be screened. The kernel keeps what it needs of `packed`.
    """

    def __call__(self, weight: Tensor, packed: LinearInT, /) -> Screen | None: ...
