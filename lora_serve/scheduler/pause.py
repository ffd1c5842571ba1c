"""Says which requests a step may be scheduled for: for all, for those that have begun, or for none.

A pause moves no request that has begun: it keeps its blocks, its adapter's version and its LoRA
slot. While the pause drains, requests that have not begun are held outside of the queue, so that
none of them stands before one that was preempted and has to end.
"""

from __future__ import annotations

from enum import Enum

from lora_serve.scheduler.request import Request, RequestStatus


class PauseState(Enum):
    """NONE: no pause. DRAINING: requests that have begun go on. PAUSED: no request does."""

    NONE = "none"
    DRAINING = "draining"
    PAUSED = "paused"


class SchedulerPause:
    """The pause, if there is one, and the requests that it holds."""

    def __init__(self) -> None:
        self.state = PauseState.NONE
        self._held: dict[Request, None] = {}  # oldest first

    @property
    def is_on(self) -> bool:
        return self.state is not PauseState.NONE

    @property
    def is_draining(self) -> bool:
        return self.state is PauseState.DRAINING

    @property
    def is_paused(self) -> bool:
        return self.state is PauseState.PAUSED

    def holds(self, request: Request) -> bool:
        """Whether a request that comes up has to be held."""
        return self.is_draining and not request.has_begun

    def hold(self, request: Request) -> None:
        """Keep a request that has left the queue until `enter` is called."""
        request.status = RequestStatus.HELD
        self._held[request] = None

    def forget(self, request: Request) -> None:
        """Drop a request that has ended, if it is held."""
        self._held.pop(request, None)

    def enter(self, state: PauseState) -> list[Request]:
        """Change the state; returns the requests that are held no longer."""
        self.state = state
        released, self._held = list(self._held), {}
        return released

    def check_invariants(self) -> None:
        """Assert what must hold between steps."""
        assert not self._held or self.is_draining, "requests are held, and nothing drains"
        for request in self._held:
            assert request.status is RequestStatus.HELD, f"{request.request_id} is not held"
