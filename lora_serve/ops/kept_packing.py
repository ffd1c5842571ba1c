"""What backends pack, as bytes that can be kept and used again.

Where they are kept is not theirs to know: `lora_serve.models.kept_weights`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PackedParts:
    """A packed weight as bytes.

    what: the kind, shape and dtype of it. parts: the address and number of bytes of each piece;
    none for a screen that the weight cannot have. layout: what packing chose by looking at the
    numbers; empty where there is nothing to choose. owner: keeps the parts alive.
    """

    what: str
    parts: tuple[tuple[int, int], ...]
    layout: tuple[int, ...]
    owner: object


class KeptPacking(Protocol):
    """What `linears` packs can be kept as bytes, and made of kept bytes again, in the same order.

    Raises:
        NotAsKeptError: in a later packing, when what is asked for is not what was kept.
    """

    def note(self) -> list[PackedParts]:
        """Add what is packed to this list, from now on."""

    def use(self, kept: Sequence[PackedParts], /) -> None:
        """Give what was kept, one after the other; weights may be of device "meta"."""

    def stop(self) -> None:
        """Pack again, and note nothing."""


class NotAsKeptError(Exception):
    """What is packed is not what was kept."""
