"""KV that a request need not compute itself: cached, being computed by another, or in a tier.

A request waits for what another one is computing, and for what a tier may have. The methods return
the requests that need not wait any longer; the caller queues them again.
"""

from __future__ import annotations

from collections.abc import Mapping

from lora_serve.kv.connector import KVConnector
from lora_serve.kv.manager import CacheHit, KVCacheManager
from lora_serve.kv.writers import PendingWrites
from lora_serve.scheduler.request import Request, RequestStatus


class SharedKV:
    """What the device's cache, the running requests and the tiers have for each other."""

    def __init__(self, kv: KVCacheManager, connector: KVConnector[Request]) -> None:
        self._kv = kv
        self._connector = connector
        self.writers: PendingWrites[Request] = PendingWrites()

    @property
    def num_deferred(self) -> int:
        return self.writers.num_waiting

    def find(self, request: Request) -> CacheHit | RequestStatus:
        """What the device's cache has for a waiting request, or what it has to wait for first.

        DEFERRED: its next block is being computed. FETCHING: a tier may have its next blocks.
        """
        hit = self._kv.lookup(request, request.num_findable_tokens)
        last = self.writers.shared_until(
            request.block_hashes, hit.num_blocks, request.num_sharable_blocks
        )
        if last is not None:
            self._connector.forget(request)
            self.writers.wait(request, last)
            return RequestStatus.DEFERRED
        if self._connector.fetch(request, hit.num_blocks, request.num_sharable_blocks):
            return RequestStatus.FETCHING
        return hit

    def num_found(self, request: Request, hit: CacheHit) -> int:
        """How many blocks the request need not compute."""
        return hit.num_blocks + self._connector.num_fetched(request, hit.num_blocks)

    def admitted(self, request: Request, hit: CacheHit) -> Mapping[str, int]:
        """Let the request begin behind what was found, and others wait for what it computes.

        Returns the number of blocks that each tier gave.
        """
        num_by_tier = self._connector.admitted(request, hit.num_blocks)
        request.num_found_blocks = hit.num_blocks + sum(num_by_tier.values())
        request.num_computed_tokens = request.num_found_blocks * request.block_size
        request.num_scheduled_tokens = request.num_computed_tokens
        if self._kv.enable_prefix_caching and request.offers_blocks:
            self.writers.announce(request, request.block_hashes[hit.num_blocks :])
        return num_by_tier

    def written(self, request: Request, blocks: range) -> list[Request]:
        """Let the tiers store what the request has computed; returns who waited for it."""
        woken = self.writers.written(request, request.block_hashes[blocks.start : blocks.stop])
        computed = range(max(blocks.start, request.num_found_blocks), blocks.stop)
        self._connector.committed(request, computed)
        return woken

    def withdraw(self, request: Request) -> list[Request]:
        """Take back what this request announced; returns the requests that waited for it."""
        return self.writers.withdraw(request)

    def forget(self, request: Request) -> None:
        """Drop what this request waited for, or was given."""
        self.writers.stop_waiting(request)
        self._connector.forget(request)
