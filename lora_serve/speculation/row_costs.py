"""How long steps take by their rows, and how many rows of drafts are worth that time.

A step that reads all weights takes about as long for two rows as for one on some machines, and
twice as long on others. So it is measured, once, with the model that is served.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


class RowSeconds:
    """Seconds of a step by its rows: between two measured numbers in proportion, and so beyond."""

    def __init__(self, measured: Sequence[tuple[int, float]]) -> None:
        """measured: two or more pairs of rows and seconds, rows ascending and different."""
        assert len(measured) > 1, "one number of rows says nothing of others"
        self._rows = [rows for rows, _ in measured]
        # No step takes longer than one of more rows: where one seems to, something else on the
        # machine made it slow. Nothing makes a step fast.
        at_most = [*accumulate((seconds for _, seconds in reversed(measured)), min)]
        self._seconds = at_most[::-1]

    def of(self, num_rows: int) -> float:
        """Seconds of a step of so many rows, one or more."""
        end = min(max(1, bisect_left(self._rows, num_rows)), len(self._rows) - 1)
        (low, high), (before, after) = (
            self._rows[end - 1 : end + 1],
            self._seconds[end - 1 : end + 1],
        )
        return before + (after - before) * (num_rows - low) / (high - low)


class RowCosts:
    """What steps take by their rows: greedy ones, and those with a row that is drawn."""

    def __init__(
        self,
        measured: Sequence[tuple[int, float]],
        draft_seconds: float = 0.0,
        drawn: Sequence[tuple[int, float]] = (),
    ) -> None:
        """measured, drawn: as of `RowSeconds`, of steps whose rows are greedy or drawn.

        Without `drawn` the others hold for all. A draw takes time for each row, and the LM head is
        screened for fewer drawn rows than for greedy ones.
        draft_seconds: of a draft model for one guess for one request; 0 without such a model.
        """
        self._draft_seconds = draft_seconds
        self._greedy = RowSeconds(measured)
        self._drawn = RowSeconds(drawn) if drawn else self._greedy

    def seconds(self, num_rows: int, *, is_drawn: bool = False) -> float:
        """Seconds of a step of so many rows, one or more. is_drawn: any of them."""
        return (self._drawn if is_drawn else self._greedy).of(num_rows)

    def draft_seconds(self, num_requests: int) -> float:
        """Seconds of the draft model for one guess, if it guesses for so many at once.

        What more rows cost it is taken to be what they cost a step.
        """
        return self._draft_seconds * self.seconds(num_requests) / self.seconds(1) / num_requests

    def num_worth(
        self,
        num_rows: int,
        num_tokens: int,
        gains: Sequence[float],
        draft_seconds: float = 0.0,
        *,
        is_drawn: bool = False,
    ) -> int:
        """How many rows of drafts to add for most tokens a second.

        Args:
            num_rows, num_tokens: that the step computes, and draws, without them.
            gains: the tokens that each row may be expected to add, largest first.
            draft_seconds: what each row costs beside its part of the step, since it must be guessed
                yet.
            is_drawn: any row of the step.
        """
        step = self._drawn if is_drawn else self._greedy
        best, most = 0, num_tokens / step.of(num_rows)
        for count, gained in enumerate(accumulate(gains), 1):
            seconds = step.of(num_rows + count) + count * draft_seconds
            rate = (num_tokens + gained) / seconds
            if rate > most:
                best, most = count, rate
        return best
