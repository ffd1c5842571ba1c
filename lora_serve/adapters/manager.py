"""Drives adapters from their first load to their last lease, for the engine's thread.

A load is read and prepared by the loader, and takes effect in `take_events`, between two steps. The
registry says what each name stands for, the residency what is in the workers' memory; after every
change of versions or leases, the residency learns which digests are still wanted. Decides no order
of requests and reads no file.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.adapters.findings import listed
from lora_serve.adapters.lanes import LoadJob
from lora_serve.adapters.loader import Loader, LoadResult
from lora_serve.adapters.registry import AdapterRegistry, adapter_info
from lora_serve.adapters.residency import AdapterResidency, Claim
from lora_serve.config import LoRAConfig
from lora_serve.errors import (
    AdapterChangedError,
    AdapterError,
    AdapterExistsError,
    AdapterNotFoundError,
    AdapterUnavailableError,
    LoraServeError,
    RankLostError,
    without_frames,
)
from lora_serve.identity import AdapterRef
from lora_serve.messages import AdapterInfo, LoadAdapter

logger = logging.getLogger(__name__)


class AdapterEvents(msgspec.Struct, frozen=True, gc=False):
    """What loads have come to: callers to answer, versions that are back, versions that are lost.

    published: each call with its adapter as it now stands, or the error it ended in. slow: versions
    that are still being read, and shall keep no LoRA slot meanwhile.
    """

    published: list[tuple[LoadAdapter, AdapterInfo | LoraServeError]] = []
    back: list[AdapterRef] = []
    lost: list[tuple[AdapterRef, LoraServeError]] = []
    slow: list[AdapterRef] = []


class AdapterManager:
    """All adapters of one engine; the `AdapterMemory` of its scheduler. One thread owns it."""

    def __init__(
        self, config: LoRAConfig, loader: Loader, clock: Callable[[], float] = time.time
    ) -> None:
        self._is_enabled = config.enable_lora
        self._loader = loader
        self._registry = AdapterRegistry(clock)
        self._residency = AdapterResidency(config.cpu_lora_limit)

    def watch_names(self, changed: Callable[[str, AdapterRef | None], None]) -> None:
        """Tell `changed` which version a name stands for, None if it was unloaded, at each change.

        Watchers are told in the order in which they came.
        """
        self._registry.watchers.append(changed)

    # ── names ───────────────────────────────────────────────────────────────────────────────

    def start_load(self, call: LoadAdapter) -> None:
        """Begin to load; `take_events` says how it ended.

        Raises:
            AdapterError: LoRA is not enabled, or the name is taken and load_inplace is not set.
        """
        self._require_enabled()
        self._registry.check_name_free(call.lora_name, call.load_inplace or call.is_examined)
        self._loader.submit(LoadJob(call.lora_path, call=call))

    def publish(
        self,
        name: str,
        checkpoint: AdapterCheckpoint,
        *,
        load_inplace: bool,
        pinned: bool = False,
        generation: int = 0,
    ) -> AdapterRef:
        """Make `name` stand for a checkpoint that the workers have prepared.

        generation: the least that its version may have.

        Raises:
            AdapterExistsError: the name is taken and `load_inplace` is not set.
        """
        before = self._registry.get(name)
        try:
            ref = self._registry.publish(
                name, checkpoint, load_inplace=load_inplace, pinned=pinned, generation=generation
            )
        except AdapterExistsError:
            self._add_prepared(checkpoint.digest)
            raise
        if before is not None:
            self._settle(before)  # what it gives up makes room
        self._add_prepared(ref.digest)
        return ref

    def unload(self, name: str) -> None:
        """Remove the name at once; the weights go with the last lease.

        Raises:
            AdapterError: LoRA is not enabled.
            AdapterNotFoundError: there is no such name.
        """
        self._require_enabled()
        self._settle(self._registry.unload(name))

    def invalidate(self, name: str, generation: int = 0) -> tuple[AdapterRef, AdapterRef]:
        """Raise the generation, at least to this one; returns (old, new) version.

        Raises:
            AdapterNotFoundError: there is no such name.
        """
        old, new = self._registry.invalidate(name, generation)
        self._settle(old)
        return old, new

    def restore(self, adapters: Sequence[AdapterInfo], generations: Mapping[str, int]) -> None:
        """Take over the adapters of an earlier engine, all of them as evicted."""
        for name, generation in generations.items():
            self._registry.raise_generation(name, generation)
        for info in adapters:
            self._registry.restore(info)

    # ── leases ──────────────────────────────────────────────────────────────────────────────

    def acquire(self, name: str) -> AdapterRef:
        """Lease what the name stands for, until `release`. Raises AdapterNotFoundError."""
        ref = self._registry.acquire(name)
        self._settle(ref)
        return ref

    def release(self, ref: AdapterRef) -> None:
        self._registry.release(ref)
        self._settle(ref)

    # ── lookups ─────────────────────────────────────────────────────────────────────────────

    def info(self, ref: AdapterRef) -> AdapterInfo:
        """Describe a version that is current or leased."""
        return self._registry.info(ref, is_resident=self.is_resident(ref))

    def invocation_tokens(self, ref: AdapterRef) -> tuple[int, ...]:
        """The invocation tokens of a version that is current or leased."""
        return self._registry.invocation_tokens(ref)

    def infos(self) -> list[AdapterInfo]:
        """Describe all adapters that have a name."""
        return [self.info(ref) for ref in self._registry.current_refs]

    @property
    def paths(self) -> tuple[str, ...]:
        """Where the adapters lie that a name or a request has."""
        return self._registry.paths

    def current(self, name: str) -> AdapterRef | None:
        """The version that the name stands for, without a lease on it."""
        return self._registry.get(name)

    @property
    def is_loading(self) -> bool:
        """Whether the loader has jobs that `take_events` will hear of."""
        return self._loader.num_pending > 0

    @property
    def next_due(self) -> float | None:
        """When `take_events` may have more to say though no thread has ended."""
        return self._loader.next_due

    @property
    def num_load_timeouts(self) -> int:
        """Loads and reloads that were given up at their deadline."""
        return self._loader.num_timeouts

    @property
    def num_late_loads(self) -> int:
        """Reads that ended after they had been given up, and were thrown away."""
        return self._loader.num_late

    @property
    def num_loads(self) -> int:
        return self._residency.num_loads

    @property
    def num_evictions(self) -> int:
        return self._residency.num_evictions

    # ── memory ──────────────────────────────────────────────────────────────────────────────

    @property
    def resident_digests(self) -> frozenset[bytes]:
        """Whose weights are in memory; linear in these, and not in all names."""
        return frozenset(digest for digest, _ in self._residency.claims())

    def is_resident(self, ref: AdapterRef) -> bool:
        return self._residency.is_resident(ref.digest)

    def request_load(self, ref: AdapterRef) -> None:
        """Have an evicted version read again; `take_events` says whether it is back or lost."""
        self._loader.submit(LoadJob(self._registry.path(ref), ref=ref))

    def on_running(self, ref: AdapterRef) -> None:
        """A request runs on this version; its weights stay until `on_idle`."""
        self._residency.on_running(ref.digest)

    def on_idle(self, ref: AdapterRef) -> None:
        self._residency.on_idle(ref.digest)

    def take_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Digests for the next step's (drop_adapters, add_adapters), since the last call."""
        return self._residency.take_changes()

    def take_events(self) -> AdapterEvents:
        """Publish what has been loaded since the last call. Between two steps."""
        events = AdapterEvents()
        for result in self._loader.take_results():
            if isinstance(result.outcome, RankLostError):
                raise result.outcome  # ranks may differ from now on: the engine cannot go on
            if result.job.call is not None:
                events.published.append((result.job.call, self._end_load(result.job.call, result)))
            elif result.job.ref is not None:
                self._end_reload(result.job.ref, result, events)
        events.slow.extend(self._loader.take_slow())
        return events

    def close(self) -> None:
        self._loader.close()

    # ── parts ───────────────────────────────────────────────────────────────────────────────

    def _end_load(self, call: LoadAdapter, result: LoadResult) -> AdapterInfo | LoraServeError:
        if isinstance(result.outcome, LoraServeError):
            return result.outcome
        if result.outcome.ignored:
            _warn_of_ignored(call, result.outcome.ignored)
        if call.is_examined:
            return _examined(call, result.outcome)
        try:
            ref = self.publish(
                call.lora_name,
                result.outcome,
                load_inplace=call.load_inplace,
                pinned=call.pinned,
                generation=call.generation,
            )
        except LoraServeError as error:
            return without_frames(error)
        return self.info(ref)

    def _end_reload(self, ref: AdapterRef, result: LoadResult, events: AdapterEvents) -> None:
        error = _reload_error(ref, result)
        if error is None:
            self._add_prepared(ref.digest, is_awaited=True)
        if error is None or self.is_resident(ref):  # the same bytes may have come by another load
            events.back.append(ref)
        else:
            events.lost.append((ref, error))

    def _require_enabled(self) -> None:
        if not self._is_enabled:
            raise AdapterError("LoRA is not enabled; start the server with --enable-lora")

    def _add_prepared(self, digest: bytes, *, is_awaited: bool = False) -> None:
        """Take over a copy that the workers have prepared, if only to drop it again."""
        self._residency.add(digest, self._claim(digest), is_awaited=is_awaited)

    def _claim(self, digest: bytes) -> Claim:
        use = self._registry.use_of(digest)
        if use is None:
            return Claim.NONE
        if use.num_pinned or use.num_superseded_leases:
            return Claim.PROTECTED
        return Claim.LEASED if use.num_leases else Claim.IDLE

    def _settle(self, ref: AdapterRef) -> None:
        self._residency.settle(ref.digest, self._claim(ref.digest))

    def check_invariants(self) -> None:
        """Assert what must hold after every operation."""
        self._registry.check_invariants()
        self._residency.check_invariants()
        for digest, claim in self._residency.claims():
            assert claim is self._claim(digest), f"{digest.hex()} was not settled: {claim.name}"


def _examined(call: LoadAdapter, checkpoint: AdapterCheckpoint) -> AdapterInfo:
    """What the name would stand for, had it been loaded."""
    ref = AdapterRef(call.lora_name, checkpoint.digest, call.generation)
    return adapter_info(ref, checkpoint, pinned=call.pinned)


def _warn_of_ignored(call: LoadAdapter, names: Sequence[str]) -> None:
    logger.warning(
        "lora adapter '%s' (%s): %d tensors are ignored, as PEFT ignores them, because the config "
        "gives their modules no LoRA (target_modules, exclude_modules, layers_to_transform, "
        "modules_to_save, lora_bias): %s; correct the config if they should act",
        *(call.lora_name, call.lora_path, len(names), listed(names)),
    )


def _reload_error(ref: AdapterRef, result: LoadResult) -> LoraServeError | None:
    """Why an evicted version cannot come back, in words for those who may generate.

    Paths, and what the files hold, are for the log: admins alone see them. The version's name is
    known, so it is never "not found".
    """
    outcome, files = result.outcome, f"The files of lora adapter '{ref.name}'"
    if isinstance(outcome, AdapterCheckpoint) and outcome.digest == ref.digest:
        return None
    found = outcome if isinstance(outcome, LoraServeError) else f"digest {outcome.digest.hex()}"
    logger.warning(
        "lora adapter '%s' (digest %s) cannot be read again from %s: %s",
        ref.name,
        ref.digest.hex(),
        result.job.path,
        found,
    )
    remedy = "restore them, or load it again with load_inplace; the server's log names them"
    if isinstance(outcome, AdapterUnavailableError):
        return AdapterUnavailableError(
            f"{files} could not be read again since it was evicted; try again later, or see the "
            "server's log"
        )
    if isinstance(outcome, AdapterNotFoundError):
        return AdapterChangedError(f"{files} are gone since it was loaded; {remedy}")
    if isinstance(outcome, LoraServeError):
        return AdapterChangedError(f"{files} cannot be read as they were loaded; {remedy}")
    return AdapterChangedError(
        f"{files} have changed since it was loaded (digest {ref.digest.hex()[:12]}, now "
        f"{outcome.digest.hex()[:12]}); {remedy}"
    )
