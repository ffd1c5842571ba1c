"""Random crowds: one share's answers take all places, and another share comes late.

The other share has had a prompt computed while the crowd waited, so that their counts differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from lora_serve.identity import NoAdapter

Name = str | NoAdapter


@dataclass(frozen=True, slots=True)
class CrowdRequest:
    """One request of a crowd, or of the share before and behind it."""

    name: Name
    tenant: str
    prompt: list[int]
    max_tokens: int


class RandomCrowds:
    """Makes crowds, one at a time, in some traces; the others stay as they are."""

    def __init__(self, rng: Random, max_num_seqs: int) -> None:
        self._rng = rng
        self._max_num_seqs = max_num_seqs
        self._probability = rng.choice((0.0, 0.05))
        self._late: CrowdRequest | None = None

    def operate(self, names: Sequence[Name]) -> list[CrowdRequest]:
        """Maybe a crowd, or the one that comes late. names: whose answers may be asked for."""
        rng = self._rng
        if self._late is not None and rng.random() < 0.3:
            late, self._late = self._late, None
            return [late] if late.name in names else []
        if self._late is not None or len(names) < 2 or rng.random() >= self._probability:
            return []
        first, other = rng.sample(names, 2)
        tenants = rng.sample(("first", "other", "third"), 2)
        early = self._request(first, tenants[0], rng.choice((1, 20, 60)), 1)
        self._late = self._request(first, tenants[0], rng.choice((1, 20)), rng.randrange(1, 20))
        return [
            early,
            *(self._request(other, tenants[1], 4, 40) for _ in range(self._max_num_seqs)),
        ]

    def _request(self, name: Name, tenant: str, num_tokens: int, max_tokens: int) -> CrowdRequest:
        prompt = [self._rng.randrange(8, 500) for _ in range(num_tokens)]
        return CrowdRequest(name, tenant, prompt, max_tokens)
