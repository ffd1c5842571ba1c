"""Cuts a growing text at the first stop string, and lets nothing out that may begin one.

Knows text only, no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Text goes in by pieces and comes out by pieces; nothing comes out after a match.

    matched: the stop string that was found, None so far.
    """

    def __init__(self, stop: Sequence[str], include_in_output: bool) -> None:
        self.matched: str | None = None
        self._stop = tuple(stop)
        self._include_in_output = include_in_output
        self._held = ""  # the longest end of the text so far that a stop string begins with

    def push(self, text: str, *, is_checked: bool = True) -> str:
        """Add text; give what is sure to be shown.

        is_checked: whether a stop string may end within this text. One that begins in unchecked
            text and ends in checked text counts.
        """
        if self.matched is not None:
            return ""
        num_held, text = len(self._held), self._held + text
        self._held = ""
        if is_checked:
            end = self._find(text, num_held)
            if end is not None:
                return text[:end]
        shown = len(text) - self._num_to_hold(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str, num_old: int) -> int | None:
        """Where to cut: at the stop string that begins first and ends after the old text."""
        begin = len(text)
        for stop in self._stop:
            found = text.find(stop, max(0, num_old + 1 - len(stop)), begin + len(stop) - 1)
            if found >= 0:
                begin, self.matched = found, stop
        if self.matched is None:
            return None
        return begin + len(self.matched) if self._include_in_output else begin

    def _num_to_hold(self, text: str) -> int:
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[-length:]
            if any(len(stop) > length and stop.startswith(tail) for stop in self._stop):
                return length
        return 0
