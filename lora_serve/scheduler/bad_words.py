"""Which tokens a request's bad words forbid next: what ends one whose other tokens stand there."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence


class BadWords:
    """Words as token ids, looked up by the token before their last: a step compares few of them."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self.longest = max(map(len, words))
        self._single = array("q", sorted({word[0] for word in words if len(word) == 1}))
        self._by_token_before: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        for word in dict.fromkeys(words):
            if len(word) > 1:
                self._by_token_before[word[-2]].append(word)

    @property
    def has_sequences(self) -> bool:
        """Whether what is forbidden depends on the tokens before."""
        return bool(self._by_token_before)

    def banned_after(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The tokens that are forbidden next.

        token_ids: the answer's so far, or at least the last longest - 1 of them.
        """
        words = self._by_token_before.get(token_ids[-1]) if token_ids else None
        if not words:
            return self._single
        ends = [word[-1] for word in words if tuple(token_ids[1 - len(word) :]) == word[:-1]]
        return (*self._single, *ends) if ends else self._single
