"""The engine in its caller's process and thread, as `LLM` has it.

Each call steps the engine until it has what was asked for. The code on both sides is the server's;
what is missing are the processes between, and their queues.
"""

from __future__ import annotations

import contextlib
import queue
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lora_serve.config import EngineConfig
from lora_serve.engine.core.build import build_engine_core
from lora_serve.engine.core.executor import make_executor
from lora_serve.engine.core.kv_event_publisher import open_publisher
from lora_serve.engine.frontend.output import OutputProcessor
from lora_serve.engine.wire import error_from_info
from lora_serve.engine_stats import EngineStats
from lora_serve.errors import EngineDeadError, LoraServeError
from lora_serve.messages import AbortRequests, CallReply, EngineMessage, EngineRequest, StepOutputs
from lora_serve.outputs import RequestOutput
from lora_serve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt, and what its choices come to."""

    message: EngineRequest
    output: RequestOutput


class InProcessEngine:
    """An engine that has loaded its model. End it with `close`."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        """Raises ConfigError: the model cannot be served as asked."""
        executor = make_executor(config)
        info = executor.load()
        self._notified: queue.SimpleQueue[None] = queue.SimpleQueue()
        try:
            self._core = build_engine_core(
                config,
                executor,
                info,
                lambda: self._notified.put(None),
                open_publisher(config.kv_events),
            )
        except BaseException:
            executor.close()
            raise
        # Ranks are processes: they end with the last reference to this engine, too.
        self._close_executor = weakref.finalize(self, executor.close)
        self._close_executor.atexit = False  # then they end with this process
        self._has_failed = False
        self.model_info = self._core.ready()
        self._outputs = OutputProcessor(tokenizer)
        self._replies: dict[int, CallReply] = {}
        self._num_calls = 0

    def close(self) -> None:
        """End what the engine has started. Again, it does nothing."""
        if not self._close_executor.alive:
            return
        try:
            self._core.close(has_failed=self._has_failed)
        finally:
            self._close_executor()

    def stats(self) -> EngineStats:
        """Gauges and totals since start."""
        return self._core.stats()

    def run(self, jobs: Sequence[Job]) -> list[RequestOutput]:
        """Answer all jobs at once; returns their outputs, filled.

        Raises:
            LoraServeError: of the first job at fault; all others are aborted. None is run, if that
                shows without a step.
        """
        owners = {choice_id: job.output for job in jobs for choice_id in job.message.choice_ids}
        try:
            for job in jobs:
                self._outputs.add(job.message)
                self._core.handle(job.message)
            self._take_in_replies(owners)  # before a step: a job may be refused
            while self._outputs.num_unfinished:
                self._step(owners)
        finally:
            growing = [request_id for request_id in owners if self._outputs.discard(request_id)]
            for request_id in growing:
                self._abort(request_id)
        return [job.output for job in jobs]

    def call(self, message_for: Callable[[int], EngineMessage]) -> CallReply:
        """Have a call carried out; `message_for` makes it of its number.

        Raises:
            LoraServeError: what the engine replied.
        """
        self._num_calls += 1
        call_id = self._num_calls
        self._core.handle(message_for(call_id))
        while call_id not in self._replies:
            self._step({})
        reply = self._replies.pop(call_id)
        if reply.error is not None:
            raise error_from_info(reply.error)
        return reply

    def _step(self, owners: dict[str, RequestOutput]) -> None:
        if self._has_failed or not self._close_executor.alive:
            raise EngineDeadError("this engine has ended; make another LLM")
        try:
            has_run = self._core.step()
        except BaseException:  # also Ctrl-C: a step that was begun was not collected
            self._has_failed = True
            raise
        has_told = self._take_in_replies(owners)
        if not has_run and not has_told and self._core.awaits_threads:
            with contextlib.suppress(queue.Empty):
                self._notified.get(timeout=self._core.idle_seconds)

    def _take_in_replies(self, owners: dict[str, RequestOutput]) -> bool:
        """Sort what the engine has said since the last call; whether there was anything."""
        has_told = False
        for reply in self._core.take_replies():
            has_told = True
            if isinstance(reply, CallReply):
                self._replies[reply.call_id] = reply
            elif isinstance(reply, StepOutputs):
                self._take_in(reply, owners)
        return has_told

    def _take_in(self, step: StepOutputs, owners: dict[str, RequestOutput]) -> None:
        for output in step.outputs:
            delta, must_abort = self._outputs.process(output)
            if isinstance(delta, LoraServeError):
                raise delta
            if delta is not None:
                owners[output.request_id].add(delta)
            if must_abort:
                self._abort(output.request_id)

    def _abort(self, request_id: str) -> None:
        self._core.handle(AbortRequests((request_id,)))
