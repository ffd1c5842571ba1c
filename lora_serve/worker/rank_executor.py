"""All ranks of a divided model as one `Executor`: the first rank's worker, and links to the others.

The one rule: steps and adapters that the first worker is given were sent to all others before, in
one order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
from msgspec import structs

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.distributed.limits import RankLimits, TimeLimit
from lora_serve.distributed.shares import RankPlace
from lora_serve.errors import ConfigError, LoraServeError, RankLostError
from lora_serve.model_info import ModelInfo
from lora_serve.step import ModelRunnerOutput, SchedulerOutput
from lora_serve.worker.rank_server import NO_MEMORY, RankLinks, send_call
from lora_serve.worker.rank_shares import adapter_share
from lora_serve.worker.rank_wire import StepEncoder
from lora_serve.worker.worker import Worker


class RankExecutor:
    """Executes steps on all ranks; see `engine.core.executor.Executor`."""

    def __init__(
        self,
        worker: Worker,
        others: Sequence[RankLinks],
        limits: RankLimits,
        close: Callable[[], None] = lambda: None,
        note_loaded: Callable[[], None] = lambda: None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """worker: of the first rank. others: to the ranks behind it, in their order.

        limits: `step` is that of what a rank is asked beside one, too. close: ends the others.
        note_loaded: called when all have loaded. check: raises RankLostError if one has ended.
        """
        self._worker = worker
        self._others = others
        self._limits = limits
        self._close = close
        self._note_loaded = note_loaded
        self._check = check
        self._places = [RankPlace(rank, len(others) + 1) for rank in range(len(others) + 1)]
        self._steps = StepEncoder()
        self._saves: deque[bool] = deque()  # of the steps not collected: whether KV comes out
        self._calls = threading.Lock()  # one call about adapters at a time
        self._lost: RankLostError | None = None  # to such a call: it may yet do it, and answer
        self._saved_decoder = msgspec.msgpack.Decoder(tuple[bytes, ...])

    def load(self) -> ModelInfo:
        """Load this rank's share, while the others load theirs.

        Raises:
            LoraServeError: as a rank tells why it cannot.
        """
        try:
            info = self._worker.load()
            for rank, links in enumerate(self._others, 1):
                _require_loaded(rank, links, self._limits.load)
        except RankLostError as error:
            told = told_by_ranks(self._others)
            self.close()
            raise told or error from error
        except BaseException:
            self.close()
            raise
        self._note_loaded()
        self._steps = StepEncoder(with_screened=self._worker.is_screened)
        return info

    def prepare_adapter(self, checkpoint: AdapterCheckpoint) -> None:
        """Make the adapter ready on all ranks, or on none.

        A rank that does not answer in time may differ from the others from then on: no further call
        is made, and the next step raises what this did.
        """
        with self._calls:
            self._require_ranks()
            try:
                self._prepare(checkpoint)
            except RankLostError as error:
                self._lost = error
                raise

    def submit(self, step: SchedulerOutput) -> None:
        """Take on a step, as `Executor` says."""
        self._require_ranks()
        message = self._steps.encode(step)
        shares = self._worker.kv_shares
        for place, links in zip(self._places[1:], self._others, strict=True):
            links.steps.send(message, limit=self._limits.step)
            if step.kv_loads:
                loads = self._steps.encode_loads(shares.split(step.kv_loads, place))
                links.steps.send(loads, limit=self._limits.step)
        if step.kv_loads:
            step = structs.replace(step, kv_loads=shares.split(step.kv_loads, self._places[0]))
        self._saves.append(bool(step.kv_saves))
        self._worker.submit(step)

    def collect(self) -> ModelRunnerOutput:
        """What came out of the oldest step, as `Executor` says."""
        output = self._worker.collect()
        if not self._saves.popleft():
            return output
        parts = [output.kv_saves]
        parts += [
            self._saved_decoder.decode(links.steps.receive(self._limits.step))
            for links in self._others
        ]
        return structs.replace(output, kv_saves=self._worker.kv_shares.merge(parts))

    def close(self) -> None:
        """End the other ranks."""
        try:
            self._worker.close()
        finally:
            self._close()

    def _require_ranks(self) -> None:
        self._check()
        if self._lost is not None:
            raise self._lost

    def _prepare(self, checkpoint: AdapterCheckpoint) -> None:
        linears, vocabulary = self._worker.linears, self._worker.vocabulary
        # All of them before the first rank is asked: an error here must leave none with its share.
        own, *shares = [
            adapter_share(checkpoint, linears, vocabulary, place) for place in self._places
        ]
        self._ask(shares)
        own_error: Exception | None = None
        try:
            self._worker.prepare_adapter(own)
        except Exception as error:  # told when the others have answered
            own_error = error
        refusals = [links.calls.receive(self._limits.step).decode() for links in self._others]
        if own_error is None and not any(refusals):
            return
        self._discard(checkpoint.digest, own_error is None, refusals)
        if own_error is not None:
            try:
                raise own_error
            finally:
                own_error = None  # or it and this frame would keep each other, and the adapter
        rank, refusal = next((r, told) for r, told in enumerate(refusals, 1) if told)
        if refusal.startswith(NO_MEMORY):
            raise MemoryError(f"rank {rank} cannot hold the adapter: {refusal}")
        raise RuntimeError(f"rank {rank} could not prepare it: {refusal}")

    def _ask(self, shares: Sequence[AdapterCheckpoint]) -> None:
        """Send each rank its share; whatever goes wrong, some may have theirs and others not."""
        try:
            for links, share in zip(self._others, shares, strict=True):
                send_call(links.calls, share, self._limits.step)
        except RankLostError:
            raise
        except BaseException as error:
            raise RankLostError(f"an adapter may have reached some ranks alone: {error}") from error

    def _discard(self, digest: bytes, own: bool, refusals: Sequence[str]) -> None:
        if own:
            self._worker.discard_adapter(digest)
        for rank, (links, refusal) in enumerate(zip(self._others, refusals, strict=True), 1):
            if not refusal:
                send_call(links.calls, digest, self._limits.step)
                told = links.calls.receive(self._limits.step).decode()
                if told:
                    raise RankLostError(f"rank {rank} could not discard an adapter: {told}")


def told_by_ranks(others: Sequence[RankLinks]) -> LoraServeError | None:
    """Why a rank could not load, if one has said so. others: to the ranks behind the first."""
    for rank, links in enumerate(others, 1):
        try:
            _require_loaded(rank, links, TimeLimit(0.0))
        except RankLostError:
            continue
        except ConfigError as error:
            return error
    return None


def _require_loaded(rank: int, links: RankLinks, limit: TimeLimit) -> None:
    refusal = links.steps.receive(limit).decode()
    if refusal:
        raise ConfigError(f"rank {rank}: {refusal}")
