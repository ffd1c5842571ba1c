"""Fair shares: whose turn it is when several tenants or adapters want more than there is.

Each share has a count of tokens that were computed for it; among those that wait, the share with
the smallest count goes first. A share that comes back after having wanted nothing begins at the
common time, which is what a share with its fair part would stand at: idleness saves up nothing,
and what a share used while no other wanted it is not held against it.

Source: virtual time as in start-time fair queueing, Goyal et al. 1996; per-token service as in
the virtual token counter, Sheng et al. 2024, arxiv.org/abs/2401.00588.
"""

from __future__ import annotations

MIN_SWEEP = 1024  # shares that are remembered before the settled ones are looked for


class FairShares:
    """Counts by share. Every operation is O(1), amortised."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._num_waiting: dict[str, int] = {}
        self._time = 0.0
        self._sweep_at = MIN_SWEEP

    def served(self, share: str) -> float:
        """Tokens served to a share; grows only."""
        return self._served.get(share, self._time)

    def arrive(self, share: str) -> None:
        """A new request of this share waits."""
        if share not in self._num_waiting:
            self._served[share] = max(self.served(share), self._time)
        self.wait(share)

    def wait(self, share: str) -> None:
        """A request of this share waits, or waits again."""
        self._served.setdefault(share, self._time)
        self._num_waiting[share] = self._num_waiting.get(share, 0) + 1

    def stop_waiting(self, share: str, count: int = 1) -> None:
        """So many of its requests wait no longer: admitted, parked or gone."""
        left = self._num_waiting[share] - count
        assert left >= 0, f"share {share}: more requests left the queue than were in it"
        if left:
            self._num_waiting[share] = left
        else:
            del self._num_waiting[share]

    def charge(self, share: str, num_tokens: int) -> None:
        """So many tokens are computed for this share."""
        self._served[share] = self.served(share) + num_tokens
        self._time += num_tokens / max(1, len(self._num_waiting))
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
