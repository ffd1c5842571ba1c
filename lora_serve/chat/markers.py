"""Searches a growing text for markers, and holds back what may begin one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class SearchStep(NamedTuple):
    """shown: text before a marker, or that belongs to none.

    With a marker: blanks stand directly before it, rest follows it and was not searched.
    """

    shown: str
    marker: str | None = None
    blanks: str = ""
    rest: str = ""


class MarkerSearch:
    """Shows text up to the first marker.

    blank: characters that go with a marker when they stand directly before it; so they are held
        back until it is known what follows them.
    """

    def __init__(self, markers: Sequence[str], blank: str) -> None:
        self._markers = tuple(markers)
        self._blank = blank
        self._pattern = re.compile("|".join(map(re.escape, markers)) or r"(?!)")
        self._max_begun = max(map(len, markers), default=1) - 1
        self._first_chars = frozenset(marker[0] for marker in markers)
        self._blanks: list[str] = []  # the end of the text so far, in pieces; before _begun
        self._begun = ""  # the longest end of the text that a marker begins with

    def push(self, text: str) -> SearchStep:
        text = self._begun + text
        found = self._pattern.search(text)
        end = len(text) - self._num_begun(text) if found is None else found.start()
        shown = self._show(text[:end])
        if found is None:
            self._begun = text[end:]
            return SearchStep(shown)
        self._begun = ""
        return SearchStep(shown, found.group(), self.flush(), text[found.end() :])

    def flush(self) -> str:
        """What was held back."""
        held = "".join(self._blanks) + self._begun
        self._blanks, self._begun = [], ""
        return held

    def _show(self, text: str) -> str:
        """All but the blanks at the end, with those that were held before them."""
        shown = text.rstrip(self._blank) if self._blank else text
        blanks = text[len(shown) :]
        if shown:
            shown = "".join(self._blanks) + shown
            self._blanks = []
        if blanks:
            self._blanks.append(blanks)
        return shown

    def _num_begun(self, text: str) -> int:
        tail = text[-self._max_begun :] if self._max_begun else ""
        if self._first_chars.isdisjoint(tail):
            return 0
        lengths = range(len(tail), 0, -1)
        ends = ((n, tail[-n:]) for n in lengths if tail[-n] in self._first_chars)
        return next((n for n, end in ends if any(m.startswith(end) for m in self._markers)), 0)
