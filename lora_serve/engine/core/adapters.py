"""Adapters as the engine's thread sees them: leases and memory, and the loader behind them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from lora_serve.adapters.checkpoint import read_adapter
from lora_serve.adapters.location import resolve_adapter_path
from lora_serve.adapters.manager import AdapterManager
from lora_serve.config import LoRAConfig
from lora_serve.engine.core.adapter_loader import AdapterLoader, LoadJob, LoadResult
from lora_serve.engine.core.executor import Executor
from lora_serve.errors import (
    AdapterChangedError,
    AdapterError,
    AdapterNotFoundError,
    LoraServeError,
)
from lora_serve.identity import AdapterRef
from lora_serve.messages import AdapterInfo, LoadAdapter
from lora_serve.step import AdapterCheckpoint, ModelInfo


class Loader(Protocol):
    """`AdapterLoader`, or a test's own."""

    def submit(self, job: LoadJob) -> None: ...

    def take_results(self) -> list[LoadResult]: ...

    def close(self) -> None: ...


def make_loader(
    config: LoRAConfig, model: ModelInfo, executor: Executor, notify: Callable[[], None]
) -> AdapterLoader:
    """A loader of checkpoints that fit this model and these limits."""

    def read(path: str) -> AdapterCheckpoint:
        return read_adapter(
            resolve_adapter_path(path, config.lora_allowed_roots),
            lora_modules=model.lora_modules,
            max_lora_rank=config.max_lora_rank,
        )

    return AdapterLoader(read, executor.prepare_adapter, notify)


@dataclass(frozen=True, slots=True)
class AdapterEvents:
    """What loads have come to: callers to answer, versions that are back, versions that are lost.

    published: each call with its adapter as it now stands, or the error it ended in.
    """

    published: list[tuple[LoadAdapter, AdapterInfo | LoraServeError]] = field(default_factory=list)
    back: list[AdapterRef] = field(default_factory=list)
    lost: list[tuple[AdapterRef, LoraServeError]] = field(default_factory=list)


class EngineAdapters:
    """The `AdapterMemory` of the scheduler, and what calls about adapters end in."""

    def __init__(self, config: LoRAConfig, loader: Loader) -> None:
        self._config = config
        self._loader = loader
        self._num_loading = 0
        self.manager = AdapterManager(config.cpu_lora_limit)

    @property
    def num_loading(self) -> int:
        return self._num_loading

    # ── AdapterMemory ───────────────────────────────────────────────────────────────────────

    def is_resident(self, ref: AdapterRef) -> bool:
        return self.manager.is_resident(ref)

    def request_load(self, ref: AdapterRef) -> None:
        self.manager.begin_load(ref)
        self._submit(LoadJob(self.manager.version(ref).path, ref=ref))

    def on_running(self, ref: AdapterRef) -> None:
        self.manager.on_running(ref)

    def on_idle(self, ref: AdapterRef) -> None:
        self.manager.on_idle(ref)

    # ── calls ───────────────────────────────────────────────────────────────────────────────

    def start_load(self, call: LoadAdapter) -> None:
        """Begin to load; `take_events` tells how it ended. Raises what can be told at once."""
        self._require_enabled()
        self.manager.check_name_free(call.lora_name, call.load_inplace)
        self._submit(LoadJob(call.lora_path, call=call))

    def acquire(self, lora_name: str) -> AdapterRef:
        if not self._config.enable_lora:
            raise AdapterNotFoundError(f"The model `{lora_name}` does not exist.", "model")
        return self.manager.acquire(lora_name)

    def unload(self, lora_name: str) -> None:
        self._require_enabled()
        self.manager.unload(lora_name)

    def take_events(self) -> AdapterEvents:
        """Publish what has been loaded since the last call. Between two steps."""
        events = AdapterEvents()
        for result in self._loader.take_results():
            self._num_loading -= 1
            if result.job.call is not None:
                events.published.append((result.job.call, self._publish(result.job.call, result)))
            elif result.job.ref is not None:
                self._settle_reload(result.job.ref, result, events)
        return events

    def close(self) -> None:
        self._loader.close()

    def _submit(self, job: LoadJob) -> None:
        self._num_loading += 1
        self._loader.submit(job)

    def _publish(self, call: LoadAdapter, result: LoadResult) -> AdapterInfo | LoraServeError:
        if result.checkpoint is None:
            assert result.error is not None, f"loading {call.lora_name} gave neither"
            return result.error
        try:
            ref = self.manager.publish(
                call.lora_name,
                result.checkpoint,
                load_inplace=call.load_inplace,
                pinned=call.pinned,
            )
        except LoraServeError as error:
            self.manager.discard_prepared(result.checkpoint.digest)
            return error
        return self.manager.info(ref)

    def _settle_reload(self, ref: AdapterRef, result: LoadResult, events: AdapterEvents) -> None:
        try:
            if result.checkpoint is None:
                assert result.error is not None, f"reloading {ref.name} gave neither"
                raise _reload_error(ref, result.job.path, result.error)
            self.manager.verify_reload(ref, result.checkpoint)
            self.manager.finish_load(ref)
            events.back.append(ref)
        except LoraServeError as error:
            self.manager.fail_load(ref)
            if self.manager.is_resident(ref):  # the same bytes came in by another load
                events.back.append(ref)
            else:
                events.lost.append((ref, error))

    def _require_enabled(self) -> None:
        if not self._config.enable_lora:
            raise AdapterError("LoRA is not enabled; start the server with --enable-lora")


def _reload_error(ref: AdapterRef, path: str, error: LoraServeError) -> LoraServeError:
    """Why an evicted version cannot come back. Its name is known, so it is never "not found"."""
    if not isinstance(error, AdapterNotFoundError):
        return error
    return AdapterChangedError(
        f"The files of lora adapter '{ref.name}' at {path} are gone since it was loaded; "
        "restore them, or load it again from elsewhere with load_inplace"
    )
