"""One rank: holds weights, KV and adapters, and executes steps. Knows no request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

import msgspec
import torch
from msgspec import structs

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.config import (
    CacheConfig,
    DraftModelConfig,
    EngineConfig,
    LoRAConfig,
    ModelConfig,
)
from lora_serve.config.parallel import WHOLE_ROWS, Reduce
from lora_serve.distributed.agreement import least, require_equal
from lora_serve.distributed.group import ALONE, ROOT, Group
from lora_serve.distributed.shares import RankPlace, place_of
from lora_serve.identity import BASE_MODEL
from lora_serve.model_info import ModelInfo, Vocabulary
from lora_serve.models.base import LinearLayout, lora_modules, num_parameters
from lora_serve.ops.block_rows import RowsRead
from lora_serve.ops.cpu.threads import default_num_threads
from lora_serve.step import (
    ModelRunnerOutput,
    RequestStepOutput,
    ScheduledRequest,
    SchedulerOutput,
)
from lora_serve.worker.adapter_weights import AdapterWeights, PreparedAdapter
from lora_serve.worker.device import Device, Event, open_device
from lora_serve.worker.draft_model import DraftModel, Guessing
from lora_serve.worker.kv_cache import allocate_kv_caches
from lora_serve.worker.kv_layout import KVLayout, layout_of_rank
from lora_serve.worker.kv_sizing import KVSizing
from lora_serve.worker.kv_transfer import KVTransfer, layout_fingerprint
from lora_serve.worker.loaded_model import LoadedModel, load_model
from lora_serve.worker.model_runner import ModelRunner, SubmittedBatch
from lora_serve.worker.rank_shares import KVShares, bias_shares
from lora_serve.worker.runners import RunnerSettings


class SubmittedStep(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A step that the device may still be at. dropped: weights that steps until `end` may read."""

    step_id: int
    batch: SubmittedBatch
    saved: RowsRead
    dropped: tuple[PreparedAdapter, ...]
    end: Event


class Worker:
    """`load` comes first. `prepare_adapter` may run in another thread than all the rest.

    device: opened as the model's config says if left out. max_draft_rows: as of StepLimits. group:
    the ranks that the model is divided among, of which this is one. reduce: as ParallelConfig has
    it. node_free_bytes: what this rank may still take of its NUMA node, where its memory is
    bound to one. draft_model: to guess with, whole on this rank.
    """

    def __init__(
        self,
        model: ModelConfig,
        cache: CacheConfig,
        lora: LoRAConfig,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        device: Device | None = None,
        max_draft_rows: int = 0,
        group: Group = ALONE,
        reduce: Reduce = WHOLE_ROWS,
        node_free_bytes: Callable[[], int] | None = None,
        draft_model: DraftModelConfig | None = None,
    ) -> None:
        self._config = model
        self._cache = cache
        self._lora = lora
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_draft_rows = max_draft_rows
        self._given_device = device
        self._group = group
        self._reduce = reduce
        self._node_free_bytes = node_free_bytes
        self._draft_config = draft_model
        self._draft_model: DraftModel | None = None
        self._place = place_of(group)
        self._device: Device
        self._adapters: AdapterWeights
        self._transfer: KVTransfer
        self.kv_shares: KVShares
        self.linears: Sequence[LinearLayout]  # of the whole model
        self.vocabulary: Vocabulary | None  # of the whole model
        self.is_screened = False
        self._runner: ModelRunner
        self._inference_mode = torch.inference_mode()  # of steps, one at a time
        self._submitted: deque[SubmittedStep] = deque()
        self._drawn: Sequence[RequestStepOutput] = ()  # by the last step that had requests

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        *,
        device: Device | None = None,
        group: Group = ALONE,
        node_free_bytes: Callable[[], int] | None = None,
    ) -> Self:
        """Make the worker of a rank as an engine's config says."""
        return cls(
            config.model,
            config.cache,
            config.lora,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            device=device,
            max_draft_rows=config.speculative.max_draft_rows,
            group=group,
            reduce=config.parallel.reduce,
            node_free_bytes=node_free_bytes,
            draft_model=config.draft_model if group.rank == ROOT else None,
        )

    @torch.inference_mode()
    def load(self) -> ModelInfo:
        """Load the model and make the KV pool.

        Raises:
            ConfigError: when the model, or a setting for it, cannot be served.
        """
        world_size = self._group.world_size
        torch.set_num_threads(
            self._config.cpu_threads
            or max(1, min(torch.get_num_threads(), default_num_threads()) // world_size)
        )
        self._device = device = self._given_device or open_device(self._config.device)
        free_bytes = device.free_bytes()
        model = load_model(self._config, device, self._cache.block_size, self._group, self._reduce)
        require_equal(self._group, model.fingerprint)
        may_change_experts = not device.counts_memory or self._lora.max_lora_expert_rank
        experts = model.spec.expert_linears() if may_change_experts else ()
        self.linears = [*model.spec.linears(), *experts]
        self.vocabulary = model.vocabulary
        self.is_screened = model.screening is not None
        linears = [linear.of_rank(self._place) for linear in self.linears]
        biases = bias_shares(model.biases, self.linears, self._place)
        self._adapters = AdapterWeights(
            linears, model.ops, device, model.dtype, model.vocabulary, biases
        )
        if self._draft_config is not None:
            self._draft_model = DraftModel(self._draft_config, model, self._cache.block_size)
        sizing = self._kv_sizing(model, linears)
        num_blocks = least(self._group, sizing.num_blocks(free_bytes))
        kv_specs = model.spec.kv_specs()
        layout = layout_of_rank(kv_specs, self._place)
        kv_caches = allocate_kv_caches(
            layout.cache_specs, model.ops, num_blocks, self._cache.block_size, model.dtype
        )
        self._transfer = KVTransfer(kv_caches, len(layout.groups))
        num_kv_heads = layout_of_rank(kv_specs, RankPlace()).cache_specs[0].num_kv_heads
        self.kv_shares = KVShares(num_kv_heads, head_bytes=kv_caches[0][0, 0, 0].nbytes)
        recorder = self._settings.recorder(model, layout, kv_caches)
        self._runner = self._settings.runner(
            model, layout, kv_caches, self._adapters, recorder, self._group
        )
        info = self._described(model, layout, num_blocks, kv_caches, num_kv_heads)
        if self._draft_model is None:
            return info
        return replace(info, draft_model=self._draft_model.open(num_blocks))

    def _described(
        self,
        model: LoadedModel,
        layout: KVLayout,
        num_blocks: int,
        kv_caches: Sequence[torch.Tensor],
        num_kv_heads: int,
    ) -> ModelInfo:
        """What the engine is told of the model. num_kv_heads: of the whole model."""
        own_heads = kv_caches[0].shape[2]
        return ModelInfo(
            fingerprint=model.fingerprint,
            dtype=str(model.dtype).removeprefix("torch."),
            vocab_size=model.spec.vocab_size,
            hidden_size=model.spec.hidden_size,
            max_model_len=model.max_model_len,
            num_blocks=num_blocks,
            kernels=model.ops.numerics,
            lora_modules=lora_modules(self.linears),
            vocabulary=model.vocabulary,
            kv_groups=layout.groups,
            kv_block_bytes=self._transfer.record_bytes // own_heads * num_kv_heads,
            kv_layout=layout_fingerprint(
                kv_caches, model.ops.numerics, layout.places, num_kv_heads
            ),
            is_asynchronous=model.device.is_asynchronous,
            architecture=model.spec.architecture,
            device=model.device.name,
            num_threads=torch.get_num_threads(),
            num_parameters=num_parameters(model.spec),
            weights=model.weights,
        )

    @torch.inference_mode()
    def prepare_adapter(self, checkpoint: AdapterCheckpoint) -> None:
        """Make the adapter's weights ready for a later step's `add_adapters`.

        checkpoint: with the share of this rank (rank_shares.adapter_share).
        """
        self._adapters.prepare(checkpoint)

    def discard_adapter(self, digest: bytes) -> None:
        """Forget what `prepare_adapter` made of it, since another rank could not."""
        self._adapters.discard(digest)

    def submit(self, step: SchedulerOutput) -> None:
        """Ask the device for the step's parts in their order, those that there are."""
        self._check(step)
        with self._inference_mode:
            dropped = self._adapters.change(step.drop_adapters, step.add_adapters)
            saved = self._transfer.gather(step.kv_saves)
            self._transfer.scatter(step.kv_loads)
            batch = self._runner.submit(step.requests)
            end = self._device.record_event()
        self._submitted.append(SubmittedStep(step.step_id, batch, saved, dropped, end))

    def has_ended(self) -> bool:
        """Whether the device is done with the oldest step that was not collected yet."""
        return self._submitted[0].end.is_done()

    def collect(self) -> ModelRunnerOutput:
        """What came out of the oldest step that was not collected yet; waits for all of it."""
        step = self._submitted.popleft()
        step.end.wait()
        results = step.batch.results()
        if self._draft_model is not None and results:
            results = self._with_guesses(self._draft_model, step.batch.requests, results)
            self._drawn = results
        return ModelRunnerOutput(step.step_id, results, step.saved.rows())

    @torch.inference_mode()
    def _with_guesses(
        self,
        draft_model: DraftModel,
        requests: Sequence[ScheduledRequest],
        results: tuple[RequestStepOutput, ...],
    ) -> tuple[RequestStepOutput, ...]:
        """The results of requests, with what the draft model guesses to follow."""
        asked: dict[int, Guessing] = {}
        for index, (request, result) in enumerate(zip(requests, results, strict=True)):
            if request.draft_chunk is None:
                continue
            drawn = result.token_ids
            if request.token_from is not None:
                drawn = (*self._drawn[request.token_from].token_ids, *drawn)
            asked[index] = request.draft_chunk, drawn
        if not asked:
            return results
        guesses = dict(zip(asked, draft_model.guess(list(asked.values())), strict=True))
        return tuple(
            structs.replace(result, next_drafts=guesses[index]) if index in guesses else result
            for index, result in enumerate(results)
        )

    def close(self) -> None:
        """Leave the other ranks, if there are any."""
        self._group.close()

    def _check(self, step: SchedulerOutput) -> None:
        loras = {one.adapter.digest for one in step.requests if one.adapter is not BASE_MODEL}
        assert len(step.requests) <= self._max_num_seqs, f"step of {len(step.requests)} requests"
        assert step.num_tokens <= self._max_num_batched_tokens, f"step of {step.num_tokens} tokens"
        assert len(loras) <= self._lora.max_loras, f"step of {len(loras)} adapters"

    def _kv_sizing(self, model: LoadedModel, linears: Sequence[LinearLayout]) -> KVSizing:
        return KVSizing(
            model=model,
            settings=self._settings,
            cache=self._cache,
            lora=self._lora,
            max_logprobs=self._config.max_logprobs,
            linears=linears,
            adapters=self._adapters,
            group=self._group,
            node_free_bytes=self._node_free_bytes,
            draft_model=self._draft_model,
        )

    @property
    def _settings(self) -> RunnerSettings:
        return RunnerSettings(
            block_size=self._cache.block_size,
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=self._max_num_batched_tokens,
            max_draft_rows=self._max_draft_rows,
            enforce_eager=self._config.enforce_eager,
            most_recorded_rows=self._config.max_cudagraph_capture_size,
            with_lora=self._lora.enable_lora,
        )
