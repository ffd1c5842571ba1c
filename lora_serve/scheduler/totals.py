"""What the scheduler counts. Cache queries and hits count prompt tokens, once for each request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lora_serve.scheduler.request import Request


@dataclass(slots=True)
class SchedulerTotals:
    """Counters since start.

    num_drafts: chunks with draft tokens, num_draft_tokens, of which num_accepted_tokens were drawn.
    num_accepted_by_position: how often the first draft token of a chunk was drawn, the second …
    external_cache_queries, _hits: the tiers', asked for what the device cache did not have.
    """

    num_steps: int = 0
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    num_generated_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_by_position: list[int] = field(default_factory=list)
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    external_cache_queries: int = 0
    external_cache_hits: int = 0

    def count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Count what became of a chunk's draft tokens; the first ones were accepted."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        missing = num_accepted - len(self.num_accepted_by_position)
        self.num_accepted_by_position += [0] * missing
        for position in range(num_accepted):
            self.num_accepted_by_position[position] += 1

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
