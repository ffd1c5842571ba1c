"""An engine for asyncio: prompts in, deltas out, adapters by name. What the server sees.

Owns the engine process through its supervisor, and tells `RunningAnswers` what becomes of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from lora_serve.config import EngineConfig
from lora_serve.engine.frontend.adapter_journal import AdapterJournal
from lora_serve.engine.frontend.admission import AdmissionControl, RequestGroup
from lora_serve.engine.frontend.bad_words import BadWordEncoder
from lora_serve.engine.frontend.base_model import other_base_model
from lora_serve.engine.frontend.calls import NO_CALL, EngineCalls
from lora_serve.engine.frontend.client import EngineClient
from lora_serve.engine.frontend.engine_process import EngineProcess
from lora_serve.engine.frontend.input import InputProcessor
from lora_serve.engine.frontend.output import OutputProcessor
from lora_serve.engine.frontend.pause import PauseRecord
from lora_serve.engine.frontend.quarantine import Quarantine
from lora_serve.engine.frontend.requests_in_flight import RequestInFlight, request_in_flight
from lora_serve.engine.frontend.running_answers import RunningAnswers
from lora_serve.engine.frontend.starting import start_parts
from lora_serve.engine.frontend.supervisor import Client, EngineSupervisor
from lora_serve.engine.frontend.watchdog import Watchdog, end_if_it_hangs
from lora_serve.engine.wire import error_from_info
from lora_serve.engine_stats import EngineStats
from lora_serve.errors import EngineDeadError
from lora_serve.generate_request import GenerateRequest
from lora_serve.identity import EVERYTHING, Everything
from lora_serve.messages import (
    AdapterInfo,
    CallReply,
    EndRequests,
    EngineMessage,
    EngineReady,
    EngineReply,
    GetRequests,
    GetStats,
    ListAdapters,
    LoadAdapter,
    Pause,
    PauseMode,
    ResetPrefixCache,
    Resume,
    StepOutputs,
    UnloadAdapter,
)
from lora_serve.observability.metrics import EngineMetrics
from lora_serve.outputs import OutputDelta
from lora_serve.pooling import LAST_NORMALISED, PoolingParams
from lora_serve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


Noted = TypeVar("Noted", bound=EngineReply)


class AsyncEngine:
    """Use `AsyncEngine.start`; end with `shutdown`."""

    def __init__(
        self,
        config: EngineConfig,
        client: Client,
        model_info: EngineReady,
        tokenizer: Tokenizer,
        metrics: EngineMetrics,
        make_client: Callable[[], Client] = EngineClient,
        pooling_defaults: PoolingParams = LAST_NORMALISED,
        quarantine: Quarantine | None = None,
    ) -> None:
        """`client` has been started, and answered with `model_info`; it is this engine's now.

        pooling_defaults: how embeddings are made where a request says nothing of it.
        """
        self.config = config
        self.model_info = model_info
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.pooling_defaults = pooling_defaults
        self._inputs = InputProcessor(
            model_info,
            config.cache.block_size,
            tuple(tokenizer.eos_token_ids),
            config.model.max_logprobs,
            config.model.max_n,
            BadWordEncoder(tokenizer.encode),
        )
        admission = AdmissionControl(
            config.limits, config.scheduler.max_num_seqs, config.scheduler.fair_share
        )
        metrics.watch_refusals(admission.num_refused)
        self._watchdog = Watchdog(config.limits.step_timeout, time.monotonic)
        self._journal = AdapterJournal()
        self._pause = PauseRecord()
        self._calls = EngineCalls()
        self._may_be_back = asyncio.Event()  # wakes those that wait for an engine
        self._has_ended = False
        self._engine = EngineSupervisor(config, client, model_info, self, make_client)
        self._answers = RunningAnswers(
            self._engine,
            admission,
            quarantine or Quarantine(),
            OutputProcessor(tokenizer),
            config.limits.max_stream_backlog,
        )
        self._watch = asyncio.create_task(
            end_if_it_hangs(self._engine, self._watchdog, lambda: self.num_unfinished),
            name="engine-watch",
        )

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        process: EngineProcess | None = None,
        *,
        loads_modules: bool = True,
        tokenizer: Future[Tokenizer] | None = None,
    ) -> AsyncEngine:
        """Start an engine, load its model and the adapters of --lora-modules.

        Args:
            process: a spawned one that is the engine's now; else a new one.
            loads_modules: False where a catalog says what their names stand for.
            tokenizer: as of `start_parts`.

        Raises:
            ConfigError: the model cannot be served as asked.
            AdapterError: one of --lora-modules cannot be loaded.
        """
        parts = await start_parts(config, process, tokenizer)
        names = config.model.served_model_name or (config.model.model,)
        engine = cls(
            config,
            parts.client,
            parts.model_info,
            parts.tokenizer,
            EngineMetrics(names[0], config),
            pooling_defaults=parts.pooling_defaults,
        )
        try:
            for name, path in config.lora.modules if loads_modules else ():
                await engine.load_lora_adapter(name, path)
        except BaseException:
            await engine.shutdown()
            raise
        return engine

    @property
    def is_alive(self) -> bool:
        """Whether there is an engine to answer; False while it is being started again."""
        return self._engine.is_serving

    def check_health(self) -> None:
        """Raise EngineDeadError, with the reason, unless requests are being answered."""
        self._require_engine()
        self._watchdog.check(0 if self._pause.is_at_rest else self.num_unfinished)

    @property
    def engine_pid(self) -> int | None:
        return self._engine.pid

    @property
    def num_unfinished(self) -> int:
        """Choices that were sent to an engine and have not ended; the quarantine's are not sent."""
        return self._answers.num_unfinished

    async def generate(
        self, request: GenerateRequest, group: RequestGroup | None = None
    ) -> AsyncGenerator[OutputDelta, None]:
        """Continue a prompt params.n times; deltas of all choices as they come.

        Closing the iterator aborts what is still growing.

        Args:
            group: the requests that are admitted together with this one, or refused with it.

        Raises:
            InvalidRequestError, AdapterNotFoundError, OverloadedError: before the first delta.
            EngineDeadError: at any time.
            RequestFailedError: this prompt kills engines.
            SlowReaderError: deltas were not taken in time.
        """
        message = self._inputs.resolve(request)
        await self._wait_for_engine()
        state = self._answers.begin(message, group)
        self._watchdog.note_request(self.num_unfinished)
        try:
            await self._answers.advance()
            num_growing = request.params.n
            while num_growing:
                delta = await state.get()
                num_growing -= delta.finish_reason is not None
                yield delta
        finally:
            if group is not None:
                group.unread += [(request.request_id, delta) for delta in state.take_unread()]
            await self._answers.end(state)

    async def load_lora_adapter(
        self,
        name: str,
        path: str,
        load_inplace: bool = False,
        pinned: bool = False,
        digest: str = "",
        generation: int = 0,
    ) -> AdapterInfo:
        """Load an adapter, if it has this digest, where one is given.

        generation: which the name must at least have from then on.

        Raises:
            AdapterError: it cannot be loaded.
        """
        reply = await self._call(
            lambda call_id: LoadAdapter(
                call_id, name, path, load_inplace, pinned, digest, generation
            )
        )
        (adapter,) = reply.adapters
        warning = other_base_model(self.config.model, adapter)
        if warning is not None:
            logger.warning("%s", warning)
        return adapter

    async def examine_lora_adapter(self, name: str, path: str, digest: str = "") -> AdapterInfo:
        """What a load of this would give, without one. Raises AdapterError as the load would."""
        reply = await self._call(
            lambda call_id: LoadAdapter(call_id, name, path, digest=digest, is_examined=True)
        )
        (adapter,) = reply.adapters
        return adapter

    def adapter(self, name: str) -> AdapterInfo | None:
        """What the name stands for, as it was when it was loaded; asks nobody."""
        return self._journal.get(name)

    async def unload_lora_adapter(self, name: str) -> None:
        await self._call(lambda call_id: UnloadAdapter(call_id, name))

    async def list_adapters(self) -> list[AdapterInfo]:
        return list((await self._call(ListAdapters)).adapters)

    async def adapter_paths(self) -> frozenset[str]:
        """Where the adapters lie that a name or a request has; no other file is read again."""
        return frozenset((await self._call(ListAdapters)).paths)

    async def reset_prefix_cache(
        self, lora_name: str | Everything = EVERYTHING, generation: int = 0
    ) -> None:
        """Forget KV; of one adapter by raising its generation, at least to this one.

        Raises:
            AdapterNotFoundError: there is no such adapter.
            NotForgottenError: a tier has not forgotten it yet; this engine uses it no more.
        """
        await self._call(lambda call_id: ResetPrefixCache(call_id, lora_name, generation))

    @property
    def is_paused(self) -> bool:
        return self._pause.is_paused

    async def pause(self, mode: PauseMode) -> int:
        """Make no more steps until `resume`; returns when none is made. Requests that come wait.

        Returns how many requests were being answered: `mode` says what became of them.

        The engine is paused from the call on, whether the caller waits for the end or not, and
        stays so if its process is started again.

        Raises:
            PauseEndedError: `resume`, or a pause that keeps them, came before requests that had
                begun had ended.
            EngineDeadError: there is no engine, or it died meanwhile: `is_paused` tells which.
        """
        self._require_engine()
        self._pause.begin()
        running = self._answers.running(lambda request: True)
        if mode == "abort":
            self._answers.end_unsent(running)
        await self._call(lambda call_id: Pause(call_id, mode))
        self._pause.came_to_rest()
        return len(running)

    async def resume(self) -> None:
        """End all pauses."""
        self._require_engine()
        self._pause.end()
        self._watchdog.note_step()
        await self._call(Resume)

    async def abort_requests(self, is_meant: Callable[[GenerateRequest], bool]) -> int:
        """End the requests that are meant, as their callers are told; how many there were."""
        meant = self._answers.running(is_meant)
        self._require_engine()
        self._answers.end_unsent(meant)
        choice_ids = tuple(c for s in meant if s.is_sent for c in s.choice_ids)
        if choice_ids:
            await self._call(lambda call_id: EndRequests(call_id, choice_ids))
        return len(meant)

    async def list_requests(
        self, is_meant: Callable[[GenerateRequest], bool], limit: int
    ) -> tuple[list[RequestInFlight], int]:
        """The newest `limit` requests that are meant, newest first, and how many are meant."""
        meant = self._answers.running(is_meant)
        newest = meant[: -limit - 1 : -1] if limit else []
        choice_ids = tuple(choice_id for state in newest for choice_id in state.choice_ids)
        reply = await self._call(lambda call_id: GetRequests(call_id, choice_ids))
        standings = {standing.request_id: standing for standing in reply.requests}
        return [request_in_flight(state.message, standings) for state in newest], len(meant)

    async def get_stats(self) -> EngineStats:
        """Gauges and totals of this moment; the metrics see them too."""
        stats = (await self._call(GetStats)).stats
        assert stats is not None, "the engine answered GetStats without stats"
        self.metrics.observe_stats(stats)
        return stats

    async def shutdown(self) -> None:
        """End the engine process; callers that still wait for it get EngineDeadError."""
        self._watch.cancel()
        error = EngineDeadError("the server is shutting down")
        self._has_ended = True
        self._may_be_back.set()
        self._answers.fail_all(error)
        self._calls.fail_all(error)
        await self._engine.close()
        self._answers.fail_all(error)  # of requests that came meanwhile

    # ── what the supervisor tells ───────────────────────────────────────────────────────────

    async def take_in(self, reply: EngineReply) -> None:
        self._watchdog.note_reply()
        if isinstance(reply, StepOutputs):
            self._watchdog.note_step()
            for output in reply.outputs:
                await self._answers.tell(output)
            _keep_books(self.metrics.observe, self._answers.with_stop_strings(reply))
            await self._answers.advance()
        elif isinstance(reply, CallReply):
            _keep_books(self._journal.note_reply, reply)
            self._calls.take_in(reply)

    def engine_died(self, error: EngineDeadError) -> None:
        logger.error("%s; answers that were running: %d", error, self.num_unfinished)
        self._journal.note_death()
        self._calls.fail_all(error)
        self._answers.engine_died(error)

    def restart_failed(self, error: Exception) -> None:
        self._answers.fail_all(EngineDeadError(f"the engine could not be started again: {error}"))

    def first_messages(self) -> Sequence[EngineMessage]:
        return [self._journal.restore_message(), *self._pause.first_messages(NO_CALL)]

    async def engine_is_back(self) -> None:
        self.metrics.count_restart()
        self._watchdog.note_step()
        self._pause.came_to_rest()
        self._may_be_back.set()
        await self._answers.engine_is_back()

    # ── parts ───────────────────────────────────────────────────────────────────────────────

    async def _call(self, message_for: Callable[[int], EngineMessage]) -> CallReply:
        with self._calls.begun() as (call_id, replied):
            message = message_for(call_id)
            self._require_engine()
            self._journal.note_call(call_id, message)
            await self._engine.send(message)
            reply = await replied
        if reply.error is not None:
            raise error_from_info(reply.error)
        return reply

    async def _wait_for_engine(self) -> None:
        """Wait for --restart-wait while an engine is being started again.

        Raises:
            EngineDeadError: it is not there yet.
        """
        if not self.is_alive and not self._has_ended:
            self._may_be_back.clear()  # here, since a death shows before `engine_died` is called
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.limits.restart_wait):
                    await self._may_be_back.wait()
        self._require_engine()

    def _require_engine(self) -> None:
        if not self.is_alive:
            raise EngineDeadError("the engine has died and is being started again; retry later")


def _keep_books(note: Callable[[Noted], None], noted: Noted) -> None:
    """Take note of a reply. A bug in that costs a line of the log, and no answer."""
    try:
        note(noted)
    except Exception:
        logger.exception("a reply of the engine could not be noted")
