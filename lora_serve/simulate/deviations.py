"""How single steps differ from what the costs say: drawn from what was measured, by a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

Ratios = Mapping[str, Sequence[float]]


class Deviations:
    """ratios: of measured to modelled times by the kind of step, each as likely as the others.

    One seed gives the same draws on every machine. Steps of a kind without ratios never deviate.
    """

    def __init__(self, ratios: Ratios, seed: str = "") -> None:
        self._ratios = ratios
        self._random = Random(seed)

    def draw(self, kind: str) -> float:
        """How often as long as modelled the next step takes."""
        ratios = self._ratios.get(kind)
        return ratios[int(self._random.random() * len(ratios))] if ratios else 1.0
