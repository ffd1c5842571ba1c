"""Fair shares: whose turn it is when several tenants or adapters want more than there is.

Each share has a count of tokens that were computed for it; among those that wait, the share with
the smallest count goes first. A share that waits for nothing counts as no less than the common
time, so idleness saves up nothing. That time is where the share stood whose turn it was last. While
no other share waits, it also moves on by what a share gets, as far as to that share's count: what
was used while no other wanted it is not held against who used it. So it is never ahead of a share
that waits, but of those that were passed over; and who begins there stands behind no other one.

Source: virtual time as in start-time fair queueing, Goyal et al. 1996, with several requests at a
time as in Jin et al. 2004; per-token service as in the virtual token counter, Sheng et al. 2024,
arxiv.org/abs/2401.00588.
"""

from __future__ import annotations

MIN_SWEEP = 1024  # shares that are remembered before the settled ones are looked for


class FairShares:
    """Counts by share. Every operation is O(1), amortised."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}  # as it was written last; ask `served`
        self._num_waiting: dict[str, int] = {}
        self._time = 0.0
        self._sweep_at = MIN_SWEEP

    def served(self, share: str) -> float:
        """Tokens served to a share; grows only."""
        if share in self._num_waiting:
            return self._served[share]
        return max(self._served.get(share, 0.0), self._time)

    def wait(self, share: str) -> None:
        """A request of this share waits, or waits again."""
        self._served[share] = self.served(share)
        self._num_waiting[share] = self._num_waiting.get(share, 0) + 1

    def stop_waiting(self, share: str, count: int = 1) -> None:
        """So many of its requests wait no longer: admitted, parked or gone."""
        left = self._num_waiting[share] - count
        assert left >= 0, f"share {share}: more requests left the queue than were in it"
        if left:
            self._num_waiting[share] = left
        else:
            del self._num_waiting[share]

    def take_turn(self, share: str) -> None:
        """A request of this share, which waits, is let in because of its count."""
        self._time = max(self._time, self._served[share])

    def charge(self, share: str, num_tokens: int) -> None:
        """So many tokens are computed for this share."""
        served = self._served.get(share, self._time) + num_tokens
        self._served[share] = served
        if len(self._num_waiting) == (share in self._num_waiting):  # no other waits
            self._time = max(self._time, min(served, self._time + num_tokens))
        if len(self._served) > self._sweep_at:
            self._sweep()

    def _sweep(self) -> None:
        """Forget who would begin at the common time anyhow."""
        self._served = {
            share: served
            for share, served in self._served.items()
            if served > self._time or share in self._num_waiting
        }
        self._sweep_at = max(MIN_SWEEP, 2 * len(self._served))
