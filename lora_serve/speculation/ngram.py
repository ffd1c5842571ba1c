"""n-gram lookup: what followed the last few tokens when they last stood in the same request."""

from __future__ import annotations

from collections.abc import Sequence

from lora_serve.identity import AdapterRef, Everything
from lora_serve.speculation.base import Origin


class NgramRequestDrafter:
    """Remembers for each n-gram of min_n to max_n tokens where it stood last.

    A token costs max_n - min_n + 1 entries, however long the request is.
    """

    def __init__(self, min_n: int, max_n: int) -> None:
        self._sizes = range(max_n, min_n - 1, -1)  # the longest is the surest
        self._ends: dict[tuple[int, ...], int] = {}  # of those that a token follows
        self._token_ids: Sequence[int] = ()
        self._num_taken = 0

    def take_in(self, token_ids: Sequence[int], most: int) -> int:
        first = self._num_taken
        self._token_ids = token_ids
        self._num_taken = min(len(token_ids), first + most)
        for end in range(max(1, first), self._num_taken):
            for size in self._sizes:
                if size <= end:
                    self._ends[tuple(token_ids[end - size : end])] = end
        return self._num_taken - first

    def draft(self, most: int) -> Sequence[int]:
        num_tokens = len(self._token_ids)
        if self._num_taken < num_tokens:
            return ()
        for size in self._sizes:
            end = self._ends.get(tuple(self._token_ids[num_tokens - size :]))
            if end is not None and size <= num_tokens:
                return continued(self._token_ids, end, most)
        return ()


class NgramDrafter:
    """Each request by its own tokens alone, so that there is nothing to learn and to forget."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self._min_n, self._max_n = min_n, max_n

    def begin(self, origin: Origin, num_prompt_tokens: int) -> NgramRequestDrafter:
        return NgramRequestDrafter(self._min_n, self._max_n)

    def learn(self, origin: Origin, answer: Sequence[int]) -> None:
        pass

    def work(self) -> None:
        pass

    def forget(self, lora_name: str | Everything, but: AdapterRef | None = None) -> None:
        pass


def continued(token_ids: Sequence[int], end: int, most: int) -> Sequence[int]:
    """What follows token_ids, if it goes on as it did behind its first `end` tokens.

    Where that leads to the end of token_ids, what came between is repeated.
    """
    found = list(token_ids[end : end + most])
    period = len(token_ids) - end
    while len(found) < most:
        found.append(found[-period])
    return found
