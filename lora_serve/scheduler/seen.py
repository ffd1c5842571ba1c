"""Which tokens a request has seen, and how often it drew each: what penalties ask.

Counted as the tokens come, so that a step never walks a long request.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from lora_serve.step import SeenTokens


class TokenCounts:
    """The tokens of one request, counted."""

    def __init__(self, prompt: Iterable[int]) -> None:
        self._places = {token_id: place for place, token_id in enumerate(dict.fromkeys(prompt))}
        self._token_ids = array("i", self._places)
        self._num_drawn = array("i", [0]) * len(self._places)

    def drew(self, token_id: int) -> None:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._token_ids):
            self._token_ids.append(token_id)
            self._num_drawn.append(0)
        self._num_drawn[place] += 1

    def seen(self) -> SeenTokens:
        return SeenTokens(self._token_ids[:], self._num_drawn[:])
