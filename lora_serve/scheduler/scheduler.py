"""Which request computes which tokens in the next step. Touches no tensor, reads no clock.

State changes in four places: `add`, `abort`, `schedule`, `update_from_output`. Running requests
go first, oldest first; without room the youngest is preempted and later recomputed. Waiting ones
follow while tokens, LoRA slots and blocks last. Admission asks for the blocks that are not cached.

A step may be planned while the one before it is in flight. It knows nothing of that one's outcome
but what is certain. A request that depends on more of it waits, and none is preempted meanwhile.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter

from lora_serve.config import SchedulerConfig
from lora_serve.identity import BASE_MODEL, EVERYTHING, AdapterRef, Everything
from lora_serve.kv.connector import KVConnector
from lora_serve.kv.manager import CacheHit, KVCacheManager
from lora_serve.kv.writers import PendingWrites
from lora_serve.kv_tiers.forgetting import Forgetting
from lora_serve.scheduler.chunk import scheduled_chunk
from lora_serve.scheduler.in_flight import ScheduledPair, StepsInFlight
from lora_serve.scheduler.lora_slots import AdapterMemory, LoRASlots
from lora_serve.scheduler.progress import RequestProgress, fresh_prompt_logprobs, take_in
from lora_serve.scheduler.queue import Slots, WaitingQueue
from lora_serve.scheduler.request import Request, RequestStatus
from lora_serve.scheduler.shares import FairShares
from lora_serve.scheduler.totals import SchedulerTotals
from lora_serve.step import (
    ModelRunnerOutput,
    RequestStepOutput,
    ScheduledRequest,
    SchedulerOutput,
)


class Scheduler:
    """Owner of all requests between their admission and their end."""

    def __init__(
        self,
        config: SchedulerConfig,
        max_loras: int,
        kv: KVCacheManager,
        adapter_memory: AdapterMemory,
        connector: KVConnector[Request],
    ) -> None:
        self._config = config
        self._kv = kv
        self._connector = connector
        self._memory = adapter_memory
        self._requests: dict[str, Request] = {}
        self._running: list[Request] = []  # oldest first
        slots: Slots = {}
        self._queue = WaitingQueue(slots, FairShares() if config.fair_share != "none" else None)
        self._slots = LoRASlots(max_loras, slots, self._queue, adapter_memory)
        self._writers: PendingWrites[Request] = PendingWrites()
        self._in_flight = StepsInFlight()
        self._planned: list[ScheduledPair] = []  # of the step that is being planned
        self.totals = SchedulerTotals()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._requests) - len(self._running)

    @property
    def num_deferred(self) -> int:
        return self._writers.num_waiting

    @property
    def num_fetching(self) -> int:
        return self._connector.num_waiting

    @property
    def num_awaiting_mask(self) -> int:
        statuses = (request.status for request in self._requests.values())
        return sum(status is RequestStatus.AWAITING_MASK for status in statuses)

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    @property
    def running_adapters(self) -> list[AdapterRef]:
        return self._slots.running

    @property
    def waiting_adapters(self) -> list[AdapterRef]:
        return self._queue.adapters

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        assert request.request_id not in self._requests, f"{request.request_id} is here already"
        self._requests[request.request_id] = request
        if request.has_grammar:
            request.status = RequestStatus.AWAITING_MASK
        else:
            self._queue.add(request)

    def abort(self, request_id: str) -> Request | None:
        """Forget a request at once, its blocks included; None if it is not (or no longer) here."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request)
        return request

    def mask_came(self, request: Request, bitmask: bytes) -> None:
        """The grammar has said what may follow the tokens that the request has now."""
        request.next_mask = bitmask
        if request.status is RequestStatus.AWAITING_MASK:
            request.status = RequestStatus.WAITING
            if request.num_preemptions:
                self._queue.push(request)
            else:
                self._queue.add(request)

    def adapter_is_slow(self, ref: AdapterRef) -> None:
        """Give the LoRA slot of a version whose weights are long on their way to another one."""
        self._slots.give_back(ref)

    def adapter_loaded(self, ref: AdapterRef) -> None:
        self._slots.load_ended(ref)

    def adapter_failed(self, ref: AdapterRef) -> list[Request]:
        """The weights of this version are lost: returns the requests that can never run."""
        lost = self._queue.take_group(ref)
        for request in lost:
            self._finish(request)
        self._slots.load_ended(ref)
        return lost

    def take_in_fetches(self) -> list[tuple[Request, str]]:
        """Let requests go on whose fetches have ended; those that must not, with what failed."""
        ended = self._connector.take_fetched()
        self._wake(ended.ready)
        for request, _ in ended.failed:
            self._finish(request)
        return [(request, str(cause)) for request, cause in ended.failed]

    def reset_prefix_cache(self, lora_name: str | Everything = EVERYTHING) -> Forgetting:
        """Forget cached KV, all or one adapter's, and what running requests would yet offer.

        Returns what tells when the tiers have forgotten it for good.
        """
        self._kv.reset(lora_name)
        waiting, forgetting = self._connector.reset(lora_name)
        self._wake(waiting)
        for request in self._running:
            if lora_name is EVERYTHING or lora_name == request.lora_name:
                request.offers_blocks = False
                self._wake(self._writers.withdraw(request))
        return forgetting

    # ── a step ──────────────────────────────────────────────────────────────────────────────

    def schedule(self) -> SchedulerOutput:
        """Decide the next step, which must be run if there is anything in it.

        One step with requests may be in flight. If blocks are short then, or a request has to give
        way, the step is empty: the report may end some, and shows which request to preempt if not.
        """
        assert len(self._in_flight) < 2, "two steps before this one have not been reported"
        self._slots.release_unused()
        self._planned = []
        budget = self._config.max_num_batched_tokens
        if victim := self._unfairly_placed():
            if self._in_flight:
                budget = 0
            else:
                victim.gave_way = True
                self._preempt(victim)
        budget, is_short = self._schedule_running(budget)
        if not is_short:  # do not admit a request that this step would have to preempt
            self._schedule_waiting(budget)
        moves = self._connector.plan()
        step_id = self._in_flight.begin(self._planned)
        chunks = tuple(chunk for _, chunk in self._planned)
        return SchedulerOutput(step_id, chunks, kv_saves=moves.saves, kv_loads=moves.loads)

    def _unfairly_placed(self) -> Request | None:
        """The request that gives way, where all places are taken and a share has none of them.

        It is the youngest of the share that has most of them. One place is left to each share, so
        a request gives way only as often as shares come that have none.
        """
        is_full = len(self._running) >= self._config.max_num_seqs
        if self._config.fair_share == "none" or not is_full:
            return None
        waiting = self._queue.peek(self._slots.is_free)
        num_places = Counter(request.share for request in self._running)
        if waiting is None or waiting.share in num_places:
            return None
        share, count = num_places.most_common(1)[0]
        victim = next(request for request in reversed(self._running) if request.share == share)
        return victim if count > 1 and victim.sort_key[0] >= waiting.sort_key[0] else None

    def _schedule_running(self, budget: int) -> tuple[int, bool]:
        """What is left of the budget, and whether blocks were short."""
        num_preemptions = self.totals.num_preemptions
        index = 0
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            index += 1
            num_tokens = request.num_ready_tokens
            if num_tokens > 1:
                # A long prefill leaves one token to each younger request, so decode never waits.
                num_younger = min(len(self._running) - index, budget - 1)
                num_tokens = min(num_tokens, budget - num_younger)
            if self._kv.has_windows:
                num_tokens = self._within_windows(request, num_tokens)
            if not num_tokens:
                continue
            end = request.num_planned_tokens + num_tokens
            if self._kv.extend(request, end) or self._make_room(request, end):
                self._plan(request, num_tokens)
                budget -= num_tokens
            elif self._in_flight:
                self._planned = []
                return budget, True
        return budget, self.totals.num_preemptions > num_preemptions

    def _within_windows(self, request: Request, num_tokens: int) -> int:
        """How many of these tokens may be planned before others are computed."""
        return min(num_tokens, self._kv.most_tokens(request) - request.num_planned_tokens)

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Extend a running request's blocks, for which there are too few, at the youngest's cost.

        False if that is itself, or if a step in flight uses the blocks of all of them.
        """
        if self._in_flight:
            return False
        while True:
            victim = self._running[-1]
            self._preempt(victim)
            if victim is request:
                return False
            if self._kv.extend(request, num_tokens):
                return True

    def _schedule_waiting(self, budget: int) -> None:
        max_looks = 2 * self._config.max_num_seqs  # a crowd is deferred over several steps
        while budget > 0 and len(self._running) < self._config.max_num_seqs and max_looks:
            max_looks -= 1
            request = self._queue.peek(self._slots.is_free)
            if request is None:
                return
            adapter = request.namespace.adapter
            if adapter is not BASE_MODEL and not self._slots.take(adapter):
                continue
            hit = self._lookup(request)
            if self._defer(request, hit) or self._fetch(request, hit):
                continue
            num_found = hit.num_blocks + self._connector.num_fetched(request, hit.num_blocks)
            if not self._kv.admit(request, hit, num_found, request.num_tokens):
                return
            budget -= self._admit(request, hit, budget)

    def _lookup(self, request: Request) -> CacheHit:
        max_tokens = 0 if request.needs_whole_prompt else request.num_tokens - 1
        return self._kv.lookup(request, max_tokens)

    def _defer(self, request: Request, hit: CacheHit) -> bool:
        """Park a request whose next block a running one is computing, until that is committed."""
        if request.needs_whole_prompt:
            return False
        last = self._writers.shared_until(
            request.block_hashes, hit.num_blocks, request.num_sharable_blocks
        )
        if last is None:
            return False
        self._connector.forget(request)
        self._park(request, RequestStatus.DEFERRED)
        self._writers.wait(request, last)
        return True

    def _fetch(self, request: Request, hit: CacheHit) -> bool:
        """Park a request whose next blocks a tier may have, until it gave them or did not."""
        if request.needs_whole_prompt:
            return False
        if not self._connector.fetch(request, hit.num_blocks, request.num_sharable_blocks):
            return False
        self._park(request, RequestStatus.FETCHING)
        return True

    def _park(self, request: Request, status: RequestStatus) -> None:
        self._queue.pop(request)
        request.status = status

    def _admit(self, request: Request, hit: CacheHit, budget: int) -> int:
        """Let a request that has its blocks run; returns how many tokens it computes now."""
        self._queue.note_admitted(request)
        self._queue.pop(request)
        request.status = RequestStatus.RUNNING
        insort(self._running, request, key=lambda r: r.sort_key)
        num_by_tier = self._connector.admitted(request, hit.num_blocks)
        request.num_found_blocks = hit.num_blocks + sum(num_by_tier.values())
        request.num_computed_tokens = request.num_found_blocks * request.block_size
        request.num_planned_tokens = request.num_computed_tokens
        if request.num_preemptions == 0:
            is_cached = self._kv.enable_prefix_caching
            self.totals.count_found(request, hit.num_blocks if is_cached else None, num_by_tier)
            self._queue.charge(request, request.num_tokens - request.num_computed_tokens)
        adapter = request.namespace.adapter
        if adapter is not BASE_MODEL:
            self._slots.start(adapter)
            if request.num_preemptions == 0:  # a preempted one still keeps its weights in memory
                self._memory.on_running(adapter)
        if self._kv.enable_prefix_caching and request.offers_blocks:
            self._writers.announce(request, request.block_hashes[hit.num_blocks :])
        num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
        if self._kv.has_windows:
            num_tokens = self._within_windows(request, num_tokens)
        self._plan(request, num_tokens)
        return num_tokens

    def _plan(self, request: Request, num_tokens: int) -> None:
        self._planned.append((request, scheduled_chunk(request, num_tokens)))

    def _preempt(self, victim: Request) -> None:
        assert not victim.num_pending_tokens, f"{victim.request_id} is preempted in flight"
        self.totals.num_preemptions += 1
        victim.num_preemptions += 1
        self._stop_running(victim)
        victim.num_computed_tokens = victim.num_planned_tokens = 0
        victim.offers_blocks = True
        if victim.has_grammar and victim.next_mask is None:
            victim.status = RequestStatus.AWAITING_MASK
        else:
            victim.status = RequestStatus.WAITING
            self._queue.push(victim)

    def _stop_running(self, request: Request) -> None:
        self._running.remove(request)
        self._kv.free(request)
        self._wake(self._writers.withdraw(request))
        if request.namespace.adapter is not BASE_MODEL:
            self._slots.stop(request.namespace.adapter)

    def _wake(self, requests: list[Request]) -> None:
        for request in requests:
            request.status = RequestStatus.WAITING
            self._queue.push(request)

    # ── after a step ────────────────────────────────────────────────────────────────────────

    def update_from_output(self, output: ModelRunnerOutput) -> list[RequestProgress]:
        """Take in what a step gave. From here on others may hit the blocks that it wrote.

        Steps are reported in the order in which they were planned. What a step computed for
        requests that have ended since it was planned is dropped.
        """
        self.totals.num_steps += 1
        self._connector.gathered(output.kv_saves)
        pairs = self._in_flight.finish(output.step_id)
        assert len(output.requests) == len(pairs), "a step answered for other requests"
        return [
            self._progress(request, chunk, result)
            for (request, chunk), result in zip(pairs, output.requests, strict=True)
            if request.status is RequestStatus.RUNNING
        ]

    def _progress(
        self, request: Request, chunk: ScheduledRequest, result: RequestStepOutput
    ) -> RequestProgress:
        self.totals.num_computed_tokens += chunk.num_tokens
        new_token_ids, finish_reason, stop_token_id = take_in(request, chunk, result)
        num_new = len(new_token_ids)
        self.totals.num_generated_tokens += num_new
        if request.num_output_tokens % request.block_size < num_new:  # in lumps, it is cheaper
            self._charge(request, num_new)
        if written := self._kv.commit(request, request.num_computed_tokens):
            self._publish(request, written)
        if self._kv.has_windows:
            self._kv.free_unseen(request, request.num_computed_tokens)
        if finish_reason is not None:
            self._finish(request)
        return RequestProgress(
            request,
            new_token_ids,
            result.logprobs[:num_new],
            fresh_prompt_logprobs(request, chunk, result) if result.prompt_logprobs else (),
            finish_reason,
            stop_token_id,
        )

    def _charge(self, request: Request, num_new: int) -> None:
        """Charge the blocks of the answer that new tokens filled."""
        size, num_tokens = request.block_size, request.num_output_tokens
        self._queue.charge(
            request, num_tokens // size * size - (num_tokens - num_new) // size * size
        )

    def _publish(self, request: Request, written: range) -> None:
        """Wake the requests that waited for these blocks, and let the tiers store them."""
        hashes = request.block_hashes[written.start : written.stop]
        self._wake(self._writers.written(request, hashes))
        computed = range(max(written.start, request.num_found_blocks), written.stop)
        self._connector.committed(request, computed)

    def _finish(self, request: Request) -> None:
        del self._requests[request.request_id]
        adapter = request.namespace.adapter
        has_run = request.status is RequestStatus.RUNNING or request.num_preemptions > 0
        if request.status is RequestStatus.RUNNING:
            self._stop_running(request)
        self._writers.stop_waiting(request)
        self._connector.forget(request)
        was_queued = request.status is RequestStatus.WAITING
        request.status = RequestStatus.FINISHED
        if was_queued:
            self._queue.note_gone(request)
        if adapter is not BASE_MODEL and has_run:
            self._memory.on_idle(adapter)

    def check_invariants(self) -> None:
        """Assert what must hold between steps."""
        self._kv.check_invariants(self._requests.values())
        self._writers.check_invariants()
        self._slots.check_invariants()
        self._connector.check_invariants()
        assert self._running == sorted(self._running, key=lambda r: r.sort_key), "running order"
        self._in_flight.check_invariants(self._running)
        for request in self._running:
            self._kv.check_tables(request, request.num_computed_tokens, request.num_planned_tokens)
        for request in self._requests.values():
            is_running = request.status is RequestStatus.RUNNING
            assert is_running == bool(request.block_tables), f"{request.request_id} and its blocks"
