"""Steps that were scheduled and have not been reported. At most two, oldest first.

The one rule: what a step in flight will have done is on its requests the moment it is scheduled
(num_scheduled_tokens, num_pending_tokens), so that the next step can go on from there. What it has
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
        self._num_scheduled = 0
        self._steps: dict[int, Sequence[ScheduledPair]] = {}

    def __len__(self) -> int:
        return len(self._steps)

    def begin(self, pairs: Sequence[ScheduledPair]) -> int:
        """Note a scheduled step, pairs in SchedulerOutput.requests' order; return its step_id."""
        self._num_scheduled += 1
        if pairs:
            self._steps[self._num_scheduled] = pairs
        for index, (request, chunk) in enumerate(pairs):
            request.num_scheduled_tokens = chunk.end
            if chunk.asked.samples:
                request.num_pending_tokens += 1
            if chunk.draft_chunk is not None and chunk.num_next_drafts:
                request.awaits_drafts = True
            request.step_index = index
        return self._num_scheduled

    def finish(self, step_id: int) -> Sequence[ScheduledPair]:
        """Take out the step that is reported: its pairs."""
        assert not self._steps or step_id <= min(self._steps), "an older step was not reported"
        return self._steps.pop(step_id, ())

    def check_invariants(self, running: Sequence[Request]) -> None:
        """Assert that of a running request is scheduled what pairs say, and none of it offered."""
        chunks: dict[Request, list[ScheduledRequest]] = {request: [] for request in running}
        for pairs in self._steps.values():
            for request, chunk in pairs:
                chunks.setdefault(request, []).append(chunk)
        for request in running:
            name, scheduled = request.request_id, chunks[request]
            starts = [*(chunk.start for chunk in scheduled), request.num_scheduled_tokens]
            ends = [request.num_computed_tokens, *(chunk.end for chunk in scheduled)]
            assert starts == ends, f"{name} has a gap in flight"
            num_drawn = sum(bool(chunk.asked.samples) for chunk in scheduled)
            assert request.num_pending_tokens == num_drawn, f"{name} waits for other tokens"
            num_offered = request.num_committed_blocks * request.block_size
            assert num_offered <= request.num_computed_tokens, f"{name} offers what is in flight"
