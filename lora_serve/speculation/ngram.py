"""n-gram lookup: what followed the last few tokens when they last stood in the same request.

The tokens are searched anew for each draft, which costs microseconds for thousands of them, so that
a request holds four bytes a token and no index.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from lora_serve.identity import AdapterRef, Everything
from lora_serve.speculation.base import Origin


class NgramRequestDrafter:
    """Looks up the longest end of the text of min_n to max_n tokens that stood before."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self._min_n, self._max_n = min_n, max_n
        self._token_ids = array("i")
        self._num_tokens = 0  # of the request, whether or not they were taken in

    def take_in(self, token_ids: Sequence[int], most: int) -> int:
        first, self._num_tokens = len(self._token_ids), len(token_ids)
        self._token_ids.extend(token_ids[first : first + most])
        return len(self._token_ids) - first

    def draft(self, most: int) -> Sequence[int]:
        if len(self._token_ids) < max(self._num_tokens, 2):
            return ()
        end = _last_end(np.frombuffer(self._token_ids, np.int32), self._min_n, self._max_n)
        return () if end is None else continued(self._token_ids, end, most)


class NgramDrafter:
    """Drafts for each request by its own tokens alone: there is nothing to learn or to forget."""

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


def _last_end(tokens: npt.NDArray[np.int32], low: int, high: int) -> int | None:
    """The place behind which the last `high` tokens stood last, or as many of them as did.

    None if not even `low` of them stood before.
    """
    ends = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1  # behind a place of the last token
    found = None
    for size in range(1, min(high, len(tokens) - 1) + 1):
        if size > 1:
            ends = ends[ends >= size]
            ends = ends[tokens[ends - size] == tokens[-size]]
        if not len(ends):
            break
        if size >= low:
            found = int(ends[-1])
    return found
