"""Steps that were planned and have not been reported. At most two, oldest first.

The one rule: what a step in flight will have done is on its requests the moment it is planned
(num_planned_tokens, num_pending_tokens), so that the next step can go on from there. What it has
done is written only when it is reported. Knows no blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from lora_serve.scheduler.request import Request
from lora_serve.step import ScheduledRequest

ScheduledPair = tuple[Request, ScheduledRequest]


class StepsInFlight:
    """The steps by step_id. One without requests changes no progress and is not kept here."""

    def __init__(self) -> None:
        self._num_planned = 0
        self._steps: dict[int, Sequence[ScheduledPair]] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def begin(self, pairs: Sequence[ScheduledPair]) -> int:
        """Note a planned step, its pairs in SchedulerOutput.requests' order; return its step_id."""
        self._num_planned += 1
        if pairs:
            self._steps[self._num_planned] = pairs
        for index, (request, chunk) in enumerate(pairs):
            request.num_planned_tokens = chunk.end
            if chunk.asked.samples:
                request.num_pending_tokens += 1
            if chunk.draft_chunk is not None and chunk.num_next_drafts:
                request.awaits_drafts = True
            request.step_index = index
        return self._num_planned

    def finish(self, step_id: int) -> Sequence[ScheduledPair]:
        """Take out the step that is reported: its pairs."""
        assert not self._steps or step_id <= min(self._steps), "an older step was not reported"
        return self._steps.pop(step_id, ())

    def check_invariants(self, running: Sequence[Request]) -> None:
        """Assert that a running request has planned what its pairs say, and offered none of it."""
        chunks: dict[Request, list[ScheduledRequest]] = {request: [] for request in running}
        for pairs in self._steps.values():
            for request, chunk in pairs:
                chunks.setdefault(request, []).append(chunk)
        for request in running:
            name, planned = request.request_id, chunks[request]
            starts = [*(chunk.start for chunk in planned), request.num_planned_tokens]
            ends = [request.num_computed_tokens, *(chunk.end for chunk in planned)]
            assert starts == ends, f"{name} has a gap in flight"
            num_drawn = sum(bool(chunk.asked.samples) for chunk in planned)
            assert request.num_pending_tokens == num_drawn, f"{name} waits for other tokens"
            num_offered = request.num_committed_blocks * request.block_size
            assert num_offered <= request.num_computed_tokens, f"{name} offers what is in flight"
