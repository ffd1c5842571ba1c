"""The engine: the only place that knows both planes. One thread owns it and all it holds.

Messages go in through `handle`, replies come out of `take_replies`, `step` does the work in
between. The same code serves a process of its own (`process.py`) and `LLM` (`in_process.py` above).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from msgspec import structs

from lora_serve.adapters.activation import adapter_start
from lora_serve.adapters.manager import AdapterManager
from lora_serve.config import EngineConfig, SpeculativeConfig
from lora_serve.engine.core.admin import AdminCalls
from lora_serve.engine.core.executor import Executor
from lora_serve.engine.core.grammars import POLL_SECONDS, RequestGrammars
from lora_serve.engine.core.handover import AnswersInHandover
from lora_serve.engine.core.kv_events import KVEvents
from lora_serve.engine.core.kv_tiers import StaleVersions
from lora_serve.engine.core.output_buffer import OutputBuffer, progress_output, request_times
from lora_serve.engine.core.start import engine_ready, num_steps_ahead
from lora_serve.engine.core.stats import engine_stats, standings
from lora_serve.engine.fair_share import share_of
from lora_serve.engine.wire import error_info
from lora_serve.engine_stats import EngineStats
from lora_serve.errors import InvalidRequestError, KVLoadError, LoraServeError
from lora_serve.generate_request import GenerateRequest
from lora_serve.identity import (
    BASE_MODEL,
    AdapterRef,
    BlockHasher,
    CacheNamespace,
    NoAdapter,
)
from lora_serve.kv.connector import KVConnector
from lora_serve.kv.manager import KVCacheManager
from lora_serve.messages import (
    AbortRequests,
    AdminCall,
    CallReply,
    Choice,
    EndRequests,
    EngineMessage,
    EngineOutput,
    EngineReady,
    EngineReply,
    EngineRequest,
    GetRequests,
    GetStats,
    Pause,
    RestoreAdapters,
)
from lora_serve.model_info import ModelInfo
from lora_serve.scheduler.arrival import request_from_message
from lora_serve.scheduler.drafting import Drafting
from lora_serve.scheduler.progress import RequestProgress
from lora_serve.scheduler.request import Request
from lora_serve.scheduler.scheduler import Scheduler
from lora_serve.speculation.methods import make_drafter
from lora_serve.speculation.row_costs import RowCosts
from lora_serve.step import SchedulerOutput
from lora_serve.structured_output.service import GrammarService

LONGEST_NAP_SECONDS = 3600.0


class EngineCore:
    """Requests, adapters and KV over one executor. Made of its parts by `build.py`."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        model: ModelInfo,
        adapters: AdapterManager,
        kv: KVCacheManager,
        hasher: BlockHasher,
        connector: KVConnector[Request],
        stale_versions: StaleVersions,
        grammars: GrammarService,
        events: KVEvents | None = None,
        clock: Callable[[], float] = time.monotonic,
        row_costs: RowCosts | None = None,
    ) -> None:
        """row_costs: of steps that verify drafts; None where they were not measured."""
        self._config = config
        self._clock = clock
        self._executor = executor
        self._model = model
        self._hasher = hasher
        self._kv = kv
        self._connector = connector
        self._num_arrived = 0
        self._num_ahead = num_steps_ahead(config, model)
        self._validates = config.scheduler.validate
        self._in_flight: deque[SchedulerOutput] = deque()
        self._outbox = OutputBuffer()
        self.adapters = adapters
        drafting = self._drafting(config.speculative, row_costs)
        self.scheduler = Scheduler(
            config.scheduler, config.lora.max_loras, kv, adapters, connector, drafting
        )
        self._admin = AdminCalls(adapters, self.scheduler, connector, stale_versions, self._outbox)
        self._grammars = RequestGrammars(grammars, self.scheduler)
        deadline_ms = config.kv_tiers.kv_save_deadline_ms
        self._in_handover = AnswersInHandover(
            connector, deadline_ms, config.cache.block_size, clock
        )
        self._events = events
        if events is not None:
            kv.record_events(events.recorder)
            connector.record_copies(events.recorder.tiers)
            adapters.watch_names(events.recorder.name_stands_for)
            events.flush()

    def _drafting(self, config: SpeculativeConfig, costs: RowCosts | None) -> Drafting | None:
        """Make what drafts tokens; None where the config asks for no drafts."""
        if not config.max_draft_rows:
            return None
        current = self.adapters.current
        drafter = make_drafter(config, self._model.draft_model)
        drafting = Drafting(config, drafter, self._kv, current, costs)
        self.adapters.watch_names(drafting.name_stands_for)
        return drafting

    @property
    def has_requests(self) -> bool:
        return self.scheduler.has_requests

    @property
    def awaits_threads(self) -> bool:
        """Whether adapters, KV or grammars are on their way from other threads."""
        is_loading = self.adapters.is_loading or self.scheduler.num_fetching > 0
        is_waiting = is_loading or self._grammars.is_waiting or self._admin.is_waiting
        return is_waiting or self._in_handover.next_due is not None

    @property
    def idle_seconds(self) -> float | None:
        """How long `step` has nothing to do unless `notify` is called; None: for ever."""
        times = (
            self._connector.next_give_up_time,
            self.adapters.next_due,
            self._in_handover.next_due,
            *self._admin.due_times,
        )
        if self._grammars.is_waiting:
            return POLL_SECONDS
        known = [when for when in times if when is not None]
        return max(0.0, min(min(known) - self._clock(), LONGEST_NAP_SECONDS)) if known else None

    def ready(self) -> EngineReady:
        """Describe the model, for the API process."""
        return engine_ready(self._model, self._kv.needs)

    def take_replies(self) -> list[EngineReply]:
        """Return the replies since the last call; a step's outputs are one message."""
        return self._outbox.take()

    def close(self, *, has_failed: bool = False) -> None:
        """Give the tiers what was computed last, and end all threads.

        has_failed: a step has raised, so that none can follow it.
        """
        if not self.has_requests and not has_failed:
            self.step()
            while self._in_flight:
                self.step()
        self._grammars.shut_down()
        self._connector.close()
        self.adapters.close()
        if self._events is not None:
            self._events.close()

    # ── messages ────────────────────────────────────────────────────────────────────────────

    def handle(self, message: EngineMessage) -> None:
        """Take in one message. A caller's error becomes a reply, and is not raised."""
        match message:
            case EngineRequest():
                for choice in message.choices:
                    self._add(message, choice)
            case AbortRequests():
                for request_id in message.request_ids:
                    self._abort(request_id)
            case GetStats() | GetRequests():
                self._outbox.reply(self._told(message))
            case RestoreAdapters():
                self._admin.restore(message)
            case EndRequests():
                self._end_all(message.request_ids)
                self._outbox.reply(CallReply(message.call_id))
            case Pause(mode="abort"):
                self._end_all(self.scheduler.request_ids)
                self._admin.handle(message)
            case _ if isinstance(message, AdminCall):
                self._admin.handle(message)

    def _add(self, message: EngineRequest, choice: Choice) -> None:
        if self.scheduler.get(choice.request_id) is not None:
            return  # sent again after a reconnect
        request = message.request
        share = share_of(request, self._config.scheduler.fair_share)
        try:
            # The salt has the API key in it where keys are isolated.
            self._grammars.open(choice.request_id, request.params, share, request.cache_salt)
            adapter, start = self._acquire(request)
        except LoraServeError as error:
            self._grammars.close(choice.request_id)
            self._outbox.output(EngineOutput(choice.request_id, error=error_info(error)))
            return
        self._num_arrived += 1
        is_ranked = self._config.scheduler.scheduling_policy == "priority"
        self.scheduler.add(
            request_from_message(
                message,
                choice,
                namespace=CacheNamespace(self._model.fingerprint, adapter, request.cache_salt),
                hasher=self._hasher,
                block_size=self._config.cache.block_size,
                sort_key=(request.priority if is_ranked else 0, self._num_arrived),
                share=share,
                adapter_start=start,
            )
        )

    def _acquire(self, request: GenerateRequest) -> tuple[AdapterRef | NoAdapter, int]:
        """Lease the version that a request is for; with where in its prompt that begins to act."""
        name = request.lora_name
        if name is BASE_MODEL:
            return name, 0
        adapter = self.adapters.acquire(name)
        try:
            tokens = self.adapters.invocation_tokens(adapter)
            return adapter, adapter_start(name, tokens, request.prompt)
        except InvalidRequestError:
            self.adapters.release(adapter)
            raise

    def _abort(self, request_id: str) -> None:
        request = self.scheduler.abort(request_id)
        if request is not None:
            self._end(request, "abort")

    def _end_all(self, request_ids: Sequence[str]) -> None:
        """End requests as their callers are told; those that are not here have ended."""
        for request_id in request_ids:
            request = self.scheduler.abort(request_id)
            if request is not None:
                self._outbox.output(
                    progress_output(RequestProgress(request, finish_reason="abort"))
                )
                self._end(request, "abort")

    # ── work ────────────────────────────────────────────────────────────────────────────────

    def step(self) -> bool:
        """Publish finished loads, schedule a step, report one; False when there was nothing to run.

        The step that is reported is the one just scheduled; or the one before it, where steps
        overlap: then the executor has the next one before it is asked for this one.
        """
        self._take_in_loads()
        self._take_in_fetches()
        self._take_in_masks()
        for output in self._in_handover.take_ended():
            self._outbox.output(output)
        self._admin.attend()
        num_requests = 0
        if not self._submit() or len(self._in_flight) > self._num_ahead:
            num_requests = self._report()
        if self._events is not None:
            self._events.flush()
        if self._validates:
            self.check_invariants()
        return num_requests > 0 or bool(self._in_flight)

    def _submit(self) -> bool:
        """Schedule a step; False if there is nothing in it."""
        step = self.scheduler.schedule()
        drop, add = self.adapters.take_changes()
        if not (step.requests or step.kv_saves or drop or add):
            return False
        self._note_first_scheduled()
        if drop or add:  # which is rare, and a copy costs each step
            self._executor.submit(structs.replace(step, drop_adapters=drop, add_adapters=add))
        else:
            self._executor.submit(step)
        self._in_flight.append(step)
        return True

    def _report(self) -> int:
        """Wait for the oldest step in flight, if any, and tell of it; how many requests it had."""
        if not self._in_flight:
            return 0
        step = self._in_flight.popleft()
        output = self._executor.collect()
        now = self._clock()
        all_progress = self.scheduler.update_from_output(output)
        self._grammars.advance(all_progress)  # they go on while the rest is done
        num_tokens = step.num_tokens
        for progress in all_progress:
            num_tokens += self._tell(progress, now)  # no row is for the token behind a prompt
            num_tokens -= progress.num_rejected_drafts
        self._outbox.count_step(num_tokens)
        return len(step.requests)

    def _note_first_scheduled(self) -> None:
        for request in self.scheduler.admitted:
            if not request.scheduled_time:
                request.scheduled_time = self._clock()

    def _tell(self, progress: RequestProgress, now: float) -> bool:
        """Send what a step gave a request; returns whether that has its first token."""
        request = progress.request
        has_begun = bool(progress.new_token_ids) and not request.first_token_time
        if has_begun:
            request.first_token_time = now
        if progress.finish_reason is not None:
            self._finish(request, progress, progress.finish_reason)
        elif progress.new_token_ids or progress.prompt_logprobs:
            self._outbox.output(progress_output(progress))
        return has_begun

    def _finish(self, request: Request, progress: RequestProgress, finish_reason: str) -> None:
        """Send a complete answer's last output, once others find its prompt's KV if they are to."""
        if request.do_remote_decode:
            self._in_handover.add(progress_output(progress))
        else:
            self._outbox.output(progress_output(progress))
        self._end(request, finish_reason)

    def _take_in_loads(self) -> None:
        events = self.adapters.take_events()
        self._admin.answer_loads(events.published)
        for ref in events.slow:
            self.scheduler.adapter_is_slow(ref)
        for ref in events.back:
            self.scheduler.adapter_loaded(ref)
        for ref, error in events.lost:
            for request in self.scheduler.adapter_failed(ref):
                self._outbox.output(EngineOutput(request.request_id, error=error_info(error)))
                self._end(request, "error")

    def _take_in_fetches(self) -> None:
        for request, cause in self.scheduler.take_in_fetches():
            error = KVLoadError(
                f"KV of this request could not be loaded from its tier ({cause}); send it again, "
                "or serve with --kv-load-failure-policy recompute"
            )
            self._outbox.output(EngineOutput(request.request_id, error=error_info(error)))
            self._end(request, "error")

    def _take_in_masks(self) -> None:
        for request, error in self._grammars.take_in():
            self.scheduler.abort(request.request_id)
            if error is None:  # the answer is complete: its grammar lets nothing follow
                self._finish(request, RequestProgress(request, finish_reason="stop"), "stop")
            else:
                self._outbox.output(EngineOutput(request.request_id, error=error_info(error)))
                self._end(request, "error")

    def _end(self, request: Request, finish_reason: str) -> None:
        """Settle what outlives a request: its adapter's lease, and its story for the metrics."""
        if request.namespace.adapter is not BASE_MODEL:
            self.adapters.release(request.namespace.adapter)
        if request.do_remote_decode and not self._in_handover.has(request.request_id):
            self._connector.end_handover(request.request_id)
        self._grammars.close(request.request_id)
        self._outbox.finished(request_times(request, finish_reason, self._clock()))

    def stats(self) -> EngineStats:
        publisher = None if self._events is None else self._events.publisher
        tiers = self._connector.stats()
        return engine_stats(self.scheduler, self.adapters, self._kv, tiers, publisher)

    def _told(self, message: GetStats | GetRequests) -> CallReply:
        if isinstance(message, GetStats):
            return CallReply(message.call_id, stats=self.stats())
        told = tuple(standings(self.scheduler, message.request_ids))
        return CallReply(message.call_id, requests=told)

    def check_invariants(self) -> None:
        """Assert what must hold between steps; `--validate` calls it after each."""
        self.scheduler.check_invariants()
        self.adapters.check_invariants()
        for request_id in self._connector.handed_over():
            is_running = self.scheduler.get(request_id) is not None
            is_awaited = is_running or self._in_handover.has(request_id)
            assert is_awaited, f"{request_id} has ended, and its handover has not"
