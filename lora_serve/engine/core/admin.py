"""The calls of operators: adapters come and go, KV is forgotten, steps pause. Each gets one reply.

A load is answered when it is published or has failed, a reset when the tiers have forgotten, a
pause when no request goes on. What a call means for running requests, the scheduler decides.
"""

from __future__ import annotations

from collections.abc import Sequence

from lora_serve.adapters.manager import AdapterManager
from lora_serve.engine.core.kv_tiers import PendingResets, StaleVersions
from lora_serve.engine.core.output_buffer import OutputBuffer
from lora_serve.engine.wire import error_info
from lora_serve.errors import LoraServeError, PauseEndedError
from lora_serve.identity import EVERYTHING
from lora_serve.kv.connector import KVConnector
from lora_serve.messages import (
    AdapterInfo,
    AdminCall,
    CallReply,
    ListAdapters,
    LoadAdapter,
    Pause,
    ResetPrefixCache,
    RestoreAdapters,
    Resume,
    UnloadAdapter,
)
from lora_serve.scheduler.request import Request
from lora_serve.scheduler.scheduler import Scheduler


class AdminCalls:
    """Carries out operators' calls on one engine's parts. Replies go into `outbox`."""

    def __init__(
        self,
        adapters: AdapterManager,
        scheduler: Scheduler,
        connector: KVConnector[Request],
        stale_versions: StaleVersions,
        outbox: OutputBuffer,
    ) -> None:
        self._adapters = adapters
        self._scheduler = scheduler
        self._connector = connector
        self._stale_versions = stale_versions
        self._outbox = outbox
        self._resets = PendingResets()
        self._pauses: list[Pause] = []  # not answered yet: some request still goes on

    @property
    def is_waiting(self) -> bool:
        """Whether a reset has yet to be answered."""
        return self._resets.next_due is not None

    @property
    def due_times(self) -> tuple[float | None, float | None]:
        """When `attend` has something to do even if no thread reports anything."""
        return self._stale_versions.next_due, self._resets.next_due

    def handle(self, call: AdminCall) -> None:
        adapters: tuple[AdapterInfo, ...] = ()
        paths: tuple[str, ...] = ()
        try:
            match call:
                case LoadAdapter():
                    self._adapters.start_load(call)
                    return  # answered when the load has ended
                case UnloadAdapter():
                    self._adapters.unload(call.lora_name)
                case ListAdapters():
                    adapters, paths = tuple(self._adapters.infos()), self._adapters.paths
                case ResetPrefixCache():
                    self._reset_prefix_cache(call)
                    return  # answered when the tiers have forgotten
                case Pause():
                    if call.mode == "keep":
                        waits = [one for one in self._pauses if one.mode == "wait"]
                        self._refuse_pauses(waits, "another pause keeps them as they stand")
                    self._scheduler.pause(drains=call.mode == "wait")
                    self._pauses.append(call)
                    return  # answered when no request goes on
                case Resume():
                    self._resume()
        except LoraServeError as error:
            self._outbox.reply(CallReply(call.call_id, error=error_info(error)))
        else:
            self._outbox.reply(CallReply(call.call_id, adapters=adapters, paths=paths))

    def restore(self, message: RestoreAdapters) -> None:
        """Take over the adapters that an engine before this one had."""
        self._adapters.restore(message.adapters, message.generations)
        for info in message.adapters:  # each may have replaced others
            self._count_down_stale_versions(info.name)

    def answer_loads(
        self, ended: Sequence[tuple[LoadAdapter, AdapterInfo | LoraServeError]]
    ) -> None:
        """Answer the calls whose loads have ended."""
        for call, outcome in ended:
            if isinstance(outcome, LoraServeError):
                reply = CallReply(call.call_id, error=error_info(outcome))
            else:
                reply = CallReply(call.call_id, adapters=(outcome,))
                if not call.is_examined:
                    self._count_down_stale_versions(call.lora_name)
            self._outbox.reply(reply)

    def attend(self) -> None:
        """Answer resets and pauses, and drop the KV of versions replaced long ago."""
        self._answer_resets()
        if self._pauses and self._scheduler.is_at_rest:
            for call in self._pauses:
                self._outbox.reply(CallReply(call.call_id))
            self._pauses = []
        for last in self._stale_versions.take_due():
            ref = self._adapters.current(last.name) or last  # a reset raises the generation
            self._connector.drop_stale(ref.name, ref.digest, ref.generation)

    def _reset_prefix_cache(self, call: ResetPrefixCache) -> None:
        reply = CallReply(call.call_id)
        if call.lora_name is not EVERYTHING:
            _, ref = self._adapters.invalidate(call.lora_name, call.generation)
            reply = CallReply(call.call_id, adapters=(self._adapters.info(ref),))
        self._resets.add(reply, self._scheduler.reset_prefix_cache(call.lora_name))
        self._answer_resets()

    def _resume(self) -> None:
        self._scheduler.resume()
        self._refuse_pauses(self._pauses, "the server was resumed")

    def _refuse_pauses(self, pauses: Sequence[Pause], cause: str) -> None:
        """Answer pauses that will not come to rest as they were meant to."""
        error = error_info(
            PauseEndedError(f"requests that had begun have not all ended: {cause}; pause it again")
        )
        for call in pauses:
            self._outbox.reply(CallReply(call.call_id, error=error))
        self._pauses = [one for one in self._pauses if one not in pauses]

    def _answer_resets(self) -> None:
        for reply in self._resets.take_ended():
            self._outbox.reply(reply)

    def _count_down_stale_versions(self, lora_name: str) -> None:
        ref = self._adapters.current(lora_name)
        assert ref is not None, f"{lora_name} was published and stands for nothing"
        self._stale_versions.published(ref)
