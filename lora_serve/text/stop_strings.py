"""Cuts a growing text at the first stop string, and holds back what may begin one.

Each character costs a few comparisons for each stop string (Knuth, Morris and Pratt 1977), however
long the stop strings are, the text, and what is held back of it. Knows text only, no tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """Takes text by pieces and gives it by pieces; after a match it gives none.

    matched: the stop string that was found, None so far.
    """

    def __init__(self, stop: Sequence[str], include_in_output: bool) -> None:
        self.matched: str | None = None
        self._searches = tuple(map(_Search, stop))
        self._include_in_output = include_in_output
        # The longest end of the text that a stop string begins with: these pieces, but for the
        # first characters of the first, which are out.
        self._held: deque[str] = deque()
        self._num_out = 0
        self._num_held = 0

    def push(self, text: str, *, is_checked: bool = True) -> str:
        """Add text; returns the text that can be shown.

        is_checked: whether a stop string may end within this text. One that begins in unchecked
            text and ends in checked text counts.
        """
        if self.matched is not None:
            return ""
        if not self._searches:
            return text
        found = self._search(text)
        if text:
            self._held.append(text)
            self._num_held += len(text)
        if is_checked and found is not None:
            begin, self.matched = found
            shown = begin + len(self.matched) if self._include_in_output else begin
            text = self._take(self._num_held - len(text) + shown)
            self._forget()
            return text
        return self._take(self._num_held - max(search.num_begun for search in self._searches))

    def flush(self) -> str:
        """The text that was held back, once no more text comes."""
        held = self._take(self._num_held)
        self._forget()
        return held

    def _search(self, text: str) -> tuple[int, str] | None:
        """Where the stop string begins that begins first of those that end in `text`, and which.

        Of two that begin together it is the first listed. What began before `text` begins below 0.
        """
        found: tuple[int, str] | None = None
        for search in self._searches:
            begin = search.push(text)
            if begin is not None and (found is None or begin < found[0]):
                found = begin, search.stop
        return found

    def _take(self, count: int) -> str:
        """The first characters of what is held, which is held no longer."""
        self._num_held -= count
        taken = []
        while count:
            piece = self._held[0][self._num_out : self._num_out + count]
            taken.append(piece)
            count -= len(piece)
            self._num_out += len(piece)
            if self._num_out == len(self._held[0]):
                self._held.popleft()
                self._num_out = 0
        return "".join(taken)

    def _forget(self) -> None:
        self._held.clear()
        self._num_out = self._num_held = 0
        for search in self._searches:
            search.num_begun = 0


class _Search:
    """One stop string's place in the text.

    num_begun: how many of its characters the text ends with, the most there can be; never all.
    """

    __slots__ = ("_borders", "num_begun", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_begun = 0
        # Of the first i characters, how many of the last are the first as well. Computed as the
        # text comes to need it, so a stop string that never begins costs nothing.
        self._borders = [0, 0]

    def push(self, text: str) -> int | None:
        """Go on with `text`; where in it the stop string begins that ends first, or None."""
        stop, borders, begun = self.stop, self._borders, self.num_begun
        begin = None
        for i, character in enumerate(text, 1):
            while begun and stop[begun] != character:
                begun = borders[begun]
            if stop[begun] == character:
                begun += 1
                if begun == len(borders):
                    borders.append(self._border(character))
                if begun == len(stop):
                    if begin is None:
                        begin = i - begun
                    begun = borders[begun]
        self.num_begun = begun
        return begin

    def _border(self, last: str) -> int:
        """The border of the next prefix, which ends with `last`."""
        border = self._borders[-1]
        while border and self.stop[border] != last:
            border = self._borders[border]
        return border + (self.stop[border] == last)
