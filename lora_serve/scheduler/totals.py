"""What the scheduler counts, and where it counts more than one thing at once."""

from __future__ import annotations

from collections.abc import Mapping

from lora_serve.engine_stats import StepTotals
from lora_serve.scheduler.request import Request


class SchedulerTotals(StepTotals):
    """The totals of the engine that this scheduler belongs to."""

    def count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Count what became of a chunk's draft tokens; the first ones were accepted."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        before = self.num_accepted_by_position
        self.num_accepted_by_position = (
            *(count + 1 for count in before[:num_accepted]),
            *([1] * (num_accepted - len(before))),
            *before[num_accepted:],
        )

    def count_found(
        self, request: Request, num_device_blocks: int | None, num_tier_blocks: Mapping[str, int]
    ) -> None:
        """Count what a request found at its first admission, and note it on the request.

        num_device_blocks: None without a device cache. num_tier_blocks: by tier; empty without.
        """
        num_blocks = {"device": num_device_blocks or 0, **num_tier_blocks}
        found = {tier: count * request.block_size for tier, count in num_blocks.items()}
        request.num_cached_tokens = sum(found.values())
        request.num_cached_by_tier = found if num_tier_blocks else {}
        if request.next_scored_position == 0:
            return  # it looked for nothing
        num_queried, num_found = request.num_prompt_tokens, found["device"]
        if num_device_blocks is not None:
            request.num_queried_tokens = num_queried
            self.prefix_cache_queries += num_queried
            self.prefix_cache_hits += num_found
        if num_tier_blocks:
            request.num_queried_tokens = num_queried
            self.external_cache_queries += num_queried - num_found
            self.external_cache_hits += request.num_cached_tokens - num_found
