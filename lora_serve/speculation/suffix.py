"""What followed the longest end of a request's tokens that stood before: in it, or in past answers.

Past answers are those of the same origin alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

from lora_serve.identity import AdapterRef, Everything
from lora_serve.speculation.base import Origin
from lora_serve.speculation.ngram import continued
from lora_serve.speculation.past_answers import PastAnswers
from lora_serve.speculation.suffix_automaton import Match, SuffixAutomaton

_MOST_PROMPT_TOKENS = 16_384  # that are looked in, the last ones; 4 MB, about
_MOST_TOKENS = 2**20  # of all requests that are drafted for; 0.1 to 0.3 GB, as they repeat


class _Room:
    """How many tokens more the drafters of all requests may take in."""

    def __init__(self) -> None:
        self.num_left = _MOST_TOKENS
        self._holders = WeakSet[SuffixRequestDrafter]()

    def add(self, holder: SuffixRequestDrafter) -> None:
        self._holders.add(holder)

    def count(self) -> None:
        """Count anew: what drafters held that are gone may be held by others."""
        self.num_left = _MOST_TOKENS - sum(holder.num_held for holder in self._holders)


class SuffixRequestDrafter:
    """The end of the text is looked for in the text itself and in the answers of its origin.

    max_depth: the longest end that counts. factor: how many tokens are drafted for each of its.
    Where there is no room for a token, nothing is drafted until there is.
    """

    def __init__(
        self,
        room: _Room,
        past: PastAnswers,
        origin: Origin,
        num_prompt_tokens: int,
        max_depth: int,
        factor: float,
    ) -> None:
        self._room = room
        self._past = past
        self._origin = origin
        self._max_depth = max_depth
        self._factor = factor
        self._first = max(0, num_prompt_tokens - _MOST_PROMPT_TOKENS)
        self._own = SuffixAutomaton()
        self._matches: list[Match] = []
        self._num_matched = 0  # tokens that these were told of
        self._token_ids: Sequence[int] = ()
        room.add(self)

    @property
    def num_held(self) -> int:
        """How many of the request's own tokens it holds."""
        return len(self._own)

    def take_in(self, token_ids: Sequence[int], most: int) -> int:
        self._token_ids = token_ids
        start = self._first + len(self._own)
        new = token_ids[start : start + max(0, min(most, self._room.num_left))]
        self._room.num_left -= len(new)
        for token_id in new:
            self._own.append(token_id)
        return len(new)

    def draft(self, most: int) -> Sequence[int]:
        token_ids = self._token_ids
        if self._first + len(self._own) < len(token_ids):
            return ()
        length, end = self._own.longest_repeat()
        for match in self._matched():
            if match.length > length and (found := match.following(most)) and match.length > length:
                return found[: self._num_likely(match.length)]
        return continued(self._own.token_ids, end, min(most, self._num_likely(length)))

    def _num_likely(self, length: int) -> int:
        """How many tokens such a match speaks for."""
        return int(self._factor * min(length, self._max_depth))

    def _matched(self) -> Sequence[Match]:
        """Matches in past answers, told of all tokens so far; of the last ones, where they are new.

        What is longer than the longest end that counts need not be known.
        """
        automata = self._past.of(self._origin)
        if [match.automaton for match in self._matches] != list(automata):
            self._matches = [Match(automaton) for automaton in automata]
            self._num_matched = max(0, len(self._token_ids) - self._max_depth)
        for token_id in self._token_ids[self._num_matched :]:
            for match in self._matches:
                match.append(token_id)
        self._num_matched = len(self._token_ids)
        return self._matches


class SuffixDrafter:
    """Request drafters over past answers that they share by origin.

    max_cached_tokens: of past answers; with 0 each request is drafted for by its own tokens alone.
    """

    def __init__(self, max_cached_tokens: int, max_depth: int, factor: float) -> None:
        self._past = PastAnswers(max_cached_tokens)
        self._room = _Room()
        self._max_depth = max_depth
        self._factor = factor

    def begin(self, origin: Origin, num_prompt_tokens: int) -> SuffixRequestDrafter:
        return SuffixRequestDrafter(
            self._room, self._past, origin, num_prompt_tokens, self._max_depth, self._factor
        )

    def learn(self, origin: Origin, answer: Sequence[int]) -> None:
        self._past.add(origin, answer)

    def work(self) -> None:
        self._past.work()
        self._room.count()

    def forget(self, lora_name: str | Everything, but: AdapterRef | None = None) -> None:
        self._past.forget(lora_name, but)
