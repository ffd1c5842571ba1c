"""A suffix automaton: finds the longest end of a text that stood somewhere before.

A state stands for substrings that end at the same places; `link` leads to the next shorter end of
them that also ends elsewhere. A token costs O(1), amortised. Several texts may be put in, one after
the other. Almost all states have one way on, which stands in arrays; the others have a dict.

Source: Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text".
"""

from __future__ import annotations

from array import array

TEXT_END = -1  # stands between two texts; no token has it
_NONE = -1
_ROOT = 0
_MOST_LINKS = 16  # whose last place is brought up to date with each token


class SuffixAutomaton:
    """token_ids: of all texts, TEXT_END before each but the first.

    lengths: of the longest substring of each state. links: as above. ends: behind one of its
    places, mostly the last one that a token follows.
    """

    def __init__(self) -> None:
        self.token_ids = array("i")
        self.lengths = array("i")
        self.links = array("i")
        self.ends = array("i")
        self._token = array("i")
        self._next = array("i")
        self._more: dict[int, dict[int, int]] = {}
        self._add_state(0, _NONE, 0)
        self._last = _ROOT  # all of the text

    def __len__(self) -> int:
        return len(self.token_ids)

    def begin_text(self) -> None:
        """What is appended from now on does not follow what is there."""
        if self.token_ids:
            self._note_places()
            self.token_ids.append(TEXT_END)
        self._last = _ROOT

    def append(self, token_id: int) -> None:
        """Add the text's next token."""
        self._note_places()
        self.token_ids.append(token_id)
        last = self._last
        if (known := self.follow(last, token_id)) is not None:  # as an earlier text began
            self._last = self._split(last, token_id, known)
            return
        state = self._add_state(self.lengths[last] + 1, _ROOT, len(self.token_ids))
        before = last
        while before != _NONE and (known := self.follow(before, token_id)) is None:
            self._set_next(before, token_id, state)
            before = self.links[before]
        if before != _NONE:
            assert known is not None, "the loop ended at a state that has this way on"
            self.links[state] = self._split(before, token_id, known)
        self._last = state

    def longest_repeat(self) -> tuple[int, int]:
        """The longest end of the text that stood before: its length, and behind which place."""
        state = self.links[self._last]
        return (0, 0) if state <= _ROOT else (self.lengths[state], self.ends[state])

    def follow(self, state: int, token_id: int) -> int | None:
        """The state that a token leads to; None if what the state stands for is never followed."""
        if self._token[state] == token_id:
            return self._next[state]
        more = self._more.get(state)
        return None if more is None else more.get(token_id)

    def _note_places(self) -> None:
        """Before a token comes: it follows the ends of the text as it is."""
        state, end = self._last, len(self.token_ids)
        for _ in range(_MOST_LINKS):
            if state <= _ROOT:
                return
            self.ends[state] = end
            state = self.links[state]

    def _split(self, before: int, token_id: int, known: int) -> int:
        """The state of what a token makes of `before`: of `known` it may be the shorter part."""
        length = self.lengths[before] + 1
        if self.lengths[known] == length:
            return known
        state = self._add_state(length, self.links[known], self.ends[known])
        self._token[state], self._next[state] = self._token[known], self._next[known]
        if known in self._more:
            self._more[state] = dict(self._more[known])
        self.links[known] = state
        while before != _NONE and self.follow(before, token_id) == known:
            self._set_next(before, token_id, state)
            before = self.links[before]
        return state

    def _add_state(self, length: int, link: int, end: int) -> int:
        self.lengths.append(length)
        self.links.append(link)
        self.ends.append(end)
        self._token.append(_NONE)
        self._next.append(_NONE)
        return len(self.lengths) - 1

    def _set_next(self, state: int, token_id: int, following: int) -> None:
        if self._token[state] in (_NONE, token_id):
            self._token[state], self._next[state] = token_id, following
        else:
            self._more.setdefault(state, {})[token_id] = following


class Match:
    """The longest end of what it is told that stands in an automaton's texts, as both grow."""

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self.automaton = automaton
        self.length = 0
        self._state = _ROOT

    def append(self, token_id: int) -> None:
        """Add what it is told next."""
        self._settle()
        automaton = self.automaton
        while (following := automaton.follow(self._state, token_id)) is None:
            if self._state == _ROOT:
                return
            self._shorten()
        self._state = following
        self.length += 1

    def following(self, most: int) -> list[int]:
        """What followed that end, at most so many tokens; the match becomes shorter if nothing."""
        self._settle()
        automaton = self.automaton
        while self._state != _ROOT:
            end = automaton.ends[self._state]
            found = automaton.token_ids[end : end + most].tolist()
            if TEXT_END in found:
                found = found[: found.index(TEXT_END)]
            if found:
                return found
            self._shorten()
        return []

    def _settle(self) -> None:
        """Find the state again: others may have been split from it since."""
        automaton = self.automaton
        while self._state != _ROOT:
            shorter = automaton.links[self._state]
            if self.length > automaton.lengths[shorter]:
                return
            self._state = shorter

    def _shorten(self) -> None:
        self._state = self.automaton.links[self._state]
        self.length = self.automaton.lengths[self._state]
