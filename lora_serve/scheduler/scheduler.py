"""Which request computes which tokens in the next step. Touches no tensor, reads no clock.

State changes in `add`, `abort`, `schedule`, `update_from_output`, `pause`, `resume` and
`reset_prefix_cache`, and where weights, fetches or masks have come. Running requests go first,
oldest first; without room the youngest is preempted and later recomputed. Waiting ones follow while
tokens, LoRA slots and blocks last. Admission asks for the blocks that are not cached.

A step may be scheduled while the one before it is in flight. It knows nothing of that one's outcome
but what is certain. A request that depends on more of it waits, and none is preempted meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from lora_serve.config import SchedulerConfig
from lora_serve.identity import BASE_MODEL, EVERYTHING, AdapterRef, Everything
from lora_serve.kv.connector import KVConnector
from lora_serve.kv.manager import CacheHit, KVCacheManager
from lora_serve.kv_tiers.forgetting import Forgetting
from lora_serve.scheduler.awaited_masks import AwaitedMasks
from lora_serve.scheduler.chunk import scheduled_chunk
from lora_serve.scheduler.drafting import Drafting
from lora_serve.scheduler.in_flight import ScheduledPair, StepsInFlight
from lora_serve.scheduler.lora_slots import AdapterMemory, LoRASlots
from lora_serve.scheduler.pause import PauseState, SchedulerPause
from lora_serve.scheduler.progress import RequestProgress, progress_of
from lora_serve.scheduler.queue import Slots, WaitingQueue
from lora_serve.scheduler.request import Request, RequestStatus
from lora_serve.scheduler.running import RunningRequests
from lora_serve.scheduler.shared_kv import SharedKV
from lora_serve.scheduler.shares import FairShares
from lora_serve.scheduler.totals import SchedulerTotals
from lora_serve.step import ModelRunnerOutput, RequestStepOutput, ScheduledRequest, SchedulerOutput
from lora_serve.structured_outputs import NO_GUESS, Guess, MaskedDrafts


class Scheduler:
    """Owner of all requests between their admission and their end."""

    def __init__(
        self,
        config: SchedulerConfig,
        max_loras: int,
        kv: KVCacheManager,
        adapter_memory: AdapterMemory,
        connector: KVConnector[Request],
        drafting: Drafting | None = None,
    ) -> None:
        """drafting: None where nothing is drafted."""
        self._config = config
        self._kv = kv
        self._connector = connector
        self._drafting = drafting
        self._memory = adapter_memory
        self._is_fair = config.fair_share != "none"
        self._requests: dict[str, Request] = {}
        self._running = RunningRequests()
        slots: Slots = {}
        self._queue = WaitingQueue(slots, FairShares() if self._is_fair else None)
        self._masks = AwaitedMasks(self._queue)
        self._slots = LoRASlots(max_loras, slots, self._queue, adapter_memory)
        self._shared = SharedKV(kv, connector)
        self._in_flight = StepsInFlight()
        self._scheduled: list[ScheduledPair] = []  # of the step that is being scheduled
        self.admitted: list[Request] = []  # in the last step that was scheduled
        self._pause = SchedulerPause()
        self.totals = SchedulerTotals()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._requests) - len(self._running)

    @property
    def num_deferred(self) -> int:
        return self._shared.num_deferred

    @property
    def num_fetching(self) -> int:
        return self._connector.num_waiting

    @property
    def num_awaiting_mask(self) -> int:
        return self._masks.num_waiting

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    @property
    def running_adapters(self) -> list[AdapterRef]:
        return self._slots.running

    @property
    def waiting_adapters(self) -> list[AdapterRef]:
        return self._queue.adapters

    @property
    def is_paused(self) -> bool:
        return self._pause.is_on

    @property
    def request_ids(self) -> list[str]:
        return list(self._requests)

    @property
    def is_at_rest(self) -> bool:
        """Whether a pause has come to where no request goes on before it ends."""
        if self._in_flight or not self._pause.is_on:
            return False
        return self._pause.is_paused or not any(r.has_begun for r in self._requests.values())

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        assert request.request_id not in self._requests, f"{request.request_id} is here already"
        self._requests[request.request_id] = request
        if request.has_grammar:
            self._masks.wait(request)
        else:
            self._queue.push(request)

    def abort(self, request_id: str) -> Request | None:
        """Forget a request at once, its blocks included; None if it is not (or no longer) here."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request)
        return request

    def mask_came(
        self, request: Request, bitmask: bytes, drafts: MaskedDrafts | None = None
    ) -> None:
        """The grammar has said what may follow the tokens that the request has now.

        drafts: that it forces or permits then, where each row behind them can draw a token.
        """
        self._masks.came(request, bitmask, drafts)

    def guesses(self, requests: Sequence[Request]) -> list[Guess]:
        """What may come next in answers with grammars."""
        if self._drafting is None:
            return [NO_GUESS] * len(requests)
        return self._drafting.guesses(requests, len(self._running))

    def pause(self, *, drains: bool) -> None:
        """Schedule no more steps for requests, or with `drains` only for those that have begun."""
        self._wake(self._pause.enter(PauseState.DRAINING if drains else PauseState.PAUSED))

    def resume(self) -> None:
        """Go on with all requests, whatever pauses there were."""
        self._wake(self._pause.enter(PauseState.NONE))

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
        if not (ended.ready or ended.failed):
            return []
        self._wake(ended.ready)
        for request, _ in ended.failed:
            self._finish(request)
        return [(request, str(cause)) for request, cause in ended.failed]

    def reset_prefix_cache(self, lora_name: str | Everything = EVERYTHING) -> Forgetting:
        """Forget cached KV, all or one adapter's, and what running requests would yet offer.

        Returns what tells when the tiers have forgotten it for good.
        """
        self._kv.reset(lora_name)
        if self._drafting is not None:
            self._drafting.reset(lora_name)
        waiting, forgetting = self._connector.reset(lora_name)
        self._wake(waiting)
        for request in self._running:
            if lora_name is EVERYTHING or lora_name == request.lora_name:
                request.offers_blocks = False
                self._wake(self._shared.withdraw(request))
        return forgetting

    # ── a step ──────────────────────────────────────────────────────────────────────────────

    def schedule(self) -> SchedulerOutput:
        """Decide the next step, which must be run if there is anything in it.

        One step with requests may be in flight. If blocks are short then, or a request has to give
        way, the step is empty: the report may end some, and shows which request to preempt if not.
        """
        assert len(self._in_flight) < 2, "two steps before this one have not been reported"
        self._slots.release_unused()
        self._scheduled = []
        self.admitted = []
        budget = 0 if self._pause.is_paused else self._config.max_num_batched_tokens
        budget, is_short = self._schedule_running(budget)
        if not is_short:  # do not admit a request that this step would have to preempt
            if self._is_fair and len(self._running) >= self._config.max_num_seqs:
                budget = self._give_way(budget)
            budget = self._schedule_waiting(budget)
            if self._drafting is not None:
                self._drafting.add(self._scheduled, budget, len(self._running))
        moves = self._connector.plan()
        step_id = self._in_flight.begin(self._scheduled)
        chunks = tuple(chunk for _, chunk in self._scheduled)
        return SchedulerOutput(step_id, chunks, kv_saves=moves.saves, kv_loads=moves.loads)

    def _schedule_running(self, budget: int) -> tuple[int, bool]:
        """What is left of the budget, and whether blocks were short."""
        num_preemptions = self.totals.num_preemptions
        running = self._running.in_order
        for index, request in enumerate(running, 1):  # a preemption takes away from its end
            if budget <= 0:
                break
            num_tokens = request.num_ready_tokens
            if num_tokens > 1:
                # A long prefill leaves one token to each younger request, so decode never waits.
                num_younger = min(len(running) - index, budget - 1)
                num_tokens = min(num_tokens, budget - num_younger)
            if self._kv.has_windows:
                num_tokens = self._within_windows(request, num_tokens)
            if not num_tokens:
                continue
            end = request.num_scheduled_tokens + num_tokens
            if self._kv.extend(request, end) or self._make_room(request, end):
                self._schedule_chunk(request, num_tokens)
                budget -= num_tokens
            elif self._in_flight:
                self._scheduled = []
                return budget, True
        return budget, self.totals.num_preemptions > num_preemptions

    def _within_windows(self, request: Request, num_tokens: int) -> int:
        """How many of these tokens may be scheduled before others are computed."""
        return min(num_tokens, self._kv.most_tokens(request) - request.num_scheduled_tokens)

    def _make_room(self, request: Request, num_tokens: int) -> bool:
        """Extend a running request's blocks, for which there are too few, at the youngest's cost.

        False if that is itself, or if a step in flight uses the blocks of all of them.
        """
        if self._in_flight:
            return False
        while True:
            victim = self._running.in_order[-1]
            self._preempt(victim)
            if victim is request:
                return False
            if self._kv.extend(request, num_tokens):
                return True

    def _give_way(self, budget: int) -> int:
        """Let a share that has none of the places, all taken, have one; what is left of the budget.

        Why no request gives way again and again: its place is another's in the same step, so all
        stay taken. It comes in again when one falls free, or by this method, once its share has
        none; but giving way leaves its share one. For both a request must have stopped otherwise.
        Hence between two such stops (ended, aborted, short of blocks) none gives way twice, and the
        oldest that runs neither gives way nor is short of blocks: it ends, and so do all.
        """
        waiting = None if self._pause.is_on else self._queue.peek(self._slots.is_free)
        if waiting is None:
            return budget
        victim = self._running.unfairly_placed(waiting, self._queue.goes_before)
        found = None if victim is None else self._found(waiting)
        if victim is None or found is None:
            return budget
        num_found = self._shared.num_found(waiting, found)
        budget_then = budget + sum(len(c.token_ids) for r, c in self._scheduled if r is victim)
        fits = self._kv.fits(found, num_found, waiting.num_tokens, without=victim)
        if not (budget_then and fits):
            return budget
        if self._in_flight:
            self._scheduled = []
            return 0
        self._scheduled = [pair for pair in self._scheduled if pair[0] is not victim]
        self._queue.admit(waiting)  # before the victim is in the queue, maybe ahead of it
        victim.gave_way = True
        self._preempt(victim)
        # The victim may have been the last running request of its adapter, and left the slot.
        has_weights = self._has_weights(waiting)
        assert has_weights, f"{victim.request_id} gave way to one whose weights are gone"
        is_admitted = self._kv.admit(waiting, found, num_found, waiting.num_tokens)
        assert is_admitted, f"{victim.request_id} gave way, and its blocks were not enough"
        return budget_then - self._admit(waiting, found, budget_then)

    def _schedule_waiting(self, budget: int) -> int:
        """What is left of the budget."""
        max_looks = 2 * self._config.max_num_seqs  # a crowd is deferred over several steps
        while budget > 0 and len(self._running) < self._config.max_num_seqs and max_looks:
            request = self._queue.peek(self._slots.is_free)
            if request is None:
                return budget
            if self._pause.holds(request):
                self._hold(request)
                continue
            max_looks -= 1
            found = self._found(request)
            if found is None:
                continue
            num_found = self._shared.num_found(request, found)
            if not self._kv.admit(request, found, num_found, request.num_tokens):
                return budget
            self._queue.admit(request)
            budget -= self._admit(request, found, budget)
        return budget

    def _found(self, request: Request) -> CacheHit | None:
        """What is cached for a request that comes up; None if weights or KV must come first.

        It is not offered again before they have come.
        """
        if not self._has_weights(request):
            return None
        found = self._shared.find(request)
        if not isinstance(found, RequestStatus):
            return found
        self._queue.pop(request)
        request.status = found
        return None

    def _has_weights(self, request: Request) -> bool:
        """Give the adapter of a request that comes up a LoRA slot; False if it must be read."""
        adapter = request.namespace.adapter
        return adapter is BASE_MODEL or self._slots.take(adapter)

    def _hold(self, request: Request) -> None:
        """Take a request out of the way of those that have begun."""
        self._queue.pop(request)
        self._pause.hold(request)
        self._slots.release_unused()  # its adapter may have had a slot that one of those needs

    def _admit(self, request: Request, hit: CacheHit, budget: int) -> int:
        """Let a request that has its blocks run; returns how many tokens it computes now."""
        request.status = RequestStatus.RUNNING
        request.gave_way = False
        self._running.add(request)
        self.admitted.append(request)
        num_by_tier = self._shared.admitted(request, hit)
        if request.num_preemptions == 0:
            is_cached = self._kv.enable_prefix_caching
            self.totals.count_found(request, hit.num_blocks if is_cached else None, num_by_tier)
            self._queue.charge(request, request.num_tokens - request.num_computed_tokens)
        adapter = request.namespace.adapter
        if adapter is not BASE_MODEL:
            self._slots.start(adapter)
            if request.num_preemptions == 0:  # a preempted one still keeps its weights in memory
                self._memory.on_running(adapter)
        num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
        if self._kv.has_windows:
            num_tokens = self._within_windows(request, num_tokens)
        self._schedule_chunk(request, num_tokens)
        return num_tokens

    def _schedule_chunk(self, request: Request, num_tokens: int) -> None:
        self._scheduled.append((request, scheduled_chunk(request, num_tokens)))

    def _preempt(self, victim: Request) -> None:
        assert not victim.num_pending_tokens, f"{victim.request_id} is preempted in flight"
        self.totals.num_preemptions += 1
        self._stop_running(victim)
        victim.start_over()
        if victim.has_grammar and victim.next_mask is None:
            self._masks.wait(victim)
        else:
            victim.status = RequestStatus.WAITING
            self._queue.push(victim)

    def _stop_running(self, request: Request) -> None:
        self._running.remove(request)
        self._kv.free(request)
        if self._drafting is not None:
            self._drafting.stopped(request)
        self._wake(self._shared.withdraw(request))
        if request.namespace.adapter is not BASE_MODEL:
            self._slots.stop(request.namespace.adapter)

    def _wake(self, requests: list[Request]) -> None:
        for request in requests:
            request.status = RequestStatus.WAITING
            self._queue.push(request)

    # ── after a step ────────────────────────────────────────────────────────────────────────

    def update_from_output(self, output: ModelRunnerOutput) -> list[RequestProgress]:
        """Take in what a step gave. From here on others may hit the blocks that it wrote.

        Steps are reported in the order in which they were scheduled. What a step computed for
        requests that have ended since it was scheduled is dropped.
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
        masked = request.masked_drafts  # those of its drafts, if it has a grammar
        progress = progress_of(request, chunk, result)
        num_computed = len(chunk.token_ids) - progress.num_rejected_drafts
        request.num_computed_in_all += num_computed
        self.totals.num_computed_tokens += num_computed
        num_new = len(progress.new_token_ids)
        self.totals.num_generated_tokens += num_new
        if self._drafting is not None:
            self._drafting.reported(chunk, result, progress, masked, self.totals)
        if self._is_fair and request.num_output_tokens % request.block_size < num_new:
            self._queue.charge_answer(request, num_new)  # in lumps, it is cheaper
        if written := self._kv.commit(request, request.num_computed_tokens):
            self._wake(self._shared.written(request, written))
        if self._kv.has_windows:
            self._kv.free_unseen(request, request.num_computed_tokens)
        if progress.finish_reason is not None:
            self._finish(request)
        return progress

    def _finish(self, request: Request) -> None:
        del self._requests[request.request_id]
        adapter = request.namespace.adapter
        has_run = request.has_begun
        if request.status is RequestStatus.RUNNING:
            self._stop_running(request)
        if self._drafting is not None:
            self._drafting.ended(request)
        self._shared.forget(request)
        self._pause.forget(request)
        was_queued = request.status is RequestStatus.WAITING
        self._masks.forget(request)
        request.status = RequestStatus.FINISHED
        if was_queued:
            self._queue.note_gone(request)
        if adapter is not BASE_MODEL and has_run:
            self._memory.on_idle(adapter)

    def check_invariants(self) -> None:
        """Assert what must hold between steps."""
        self._kv.check_invariants(self._requests.values())
        self._shared.writers.check_invariants()
        self._slots.check_invariants()
        self._connector.check_invariants()
        self._pause.check_invariants()
        self._running.check_invariants()
        self._masks.check_invariants(self._requests.values())
        self._in_flight.check_invariants(list(self._running))
        if self._drafting is not None:
            self._drafting.check_invariants()
        for request in self._running:
            self._kv.check_tables(
                request, request.num_computed_tokens, request.num_scheduled_tokens
            )
        for request in self._requests.values():
            is_running = request.status is RequestStatus.RUNNING
            assert is_running == bool(request.block_tables), f"{request.request_id} and its blocks"
