"""One rank: holds weights, KV and adapters, and executes steps. Knows no request."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from msgspec import structs
from torch import Tensor

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.config import CacheConfig, DraftModelConfig, LoRAConfig, ModelConfig
from lora_serve.distributed.agreement import least, require_equal
from lora_serve.distributed.group import ALONE, Group
from lora_serve.distributed.shares import RankPlace, place_of
from lora_serve.identity import BASE_MODEL, AdapterRef, NoAdapter
from lora_serve.kv_groups import KVNeeds
from lora_serve.model_info import ModelInfo, Vocabulary
from lora_serve.models.base import (
    LinearLayout,
    lora_modules,
    num_parameters,
    vocabulary_linears,
)
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
from lora_serve.worker.kv_cache import (
    NO_DRAFT_BLOCKS,
    DraftBlocks,
    allocate_kv_caches,
    kv_block_bytes,
    num_kv_blocks,
)
from lora_serve.worker.kv_layout import KVLayout, kv_layout
from lora_serve.worker.kv_transfer import KVTransfer, layout_fingerprint
from lora_serve.worker.largest_steps import StepLimits, largest_adapter, largest_steps
from lora_serve.worker.loaded_model import LoadedModel, load_model
from lora_serve.worker.memory import (
    GpuMemory,
    Room,
    cpu_room,
    largest_adapter_bytes,
    largest_vocabulary_bytes,
)
from lora_serve.worker.model_runner import ModelRunner, SubmittedBatch
from lora_serve.worker.rank_shares import KVShares, bias_shares
from lora_serve.worker.runners import RunnerSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SubmittedStep:
    """A step that the device may still be at. dropped: weights that steps until `end` may read."""

    step_id: int
    batch: SubmittedBatch
    saved: RowsRead
    dropped: tuple[PreparedAdapter, ...]
    end: Event


class Worker:
    """`load` comes first. `prepare_adapter` may run in another thread than all the rest.

    device: opened as the model's config says if left out. max_draft_rows: as of StepLimits. group:
    the ranks that the model is divided among, of which this is one. num_segments: as ParallelConfig
    has them. node_free_bytes: what this rank may still take of its NUMA node, where its memory is
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
        num_segments: int = 1,
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
        self._num_segments = num_segments
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
        self._submitted: deque[SubmittedStep] = deque()
        self._drawn: Sequence[RequestStepOutput] = ()  # by the last step that had requests

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
        model = load_model(
            self._config, device, self._cache.block_size, self._group, self._num_segments
        )
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
        layout = self._kv_layout(model, self._place)
        num_blocks = least(self._group, self._num_kv_blocks(model, layout, free_bytes))
        kv_caches = self._kv_caches(model, layout, num_blocks)
        self._transfer = KVTransfer(kv_caches, len(layout.groups))
        num_kv_heads = self._kv_layout(model, RankPlace()).cache_specs[0].num_kv_heads
        self.kv_shares = KVShares(num_kv_heads, head_bytes=kv_caches[0][0, 0, 0].nbytes)
        recorder = self._settings.recorder(model, layout, kv_caches)
        self._runner = self._settings.runner(
            model, layout, kv_caches, self._adapters, recorder, self._group
        )
        draft_model = self._draft_model.open(num_blocks) if self._draft_model else None
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
            kv_block_bytes=self._transfer.record_bytes // kv_caches[0].shape[2] * num_kv_heads,
            kv_layout=layout_fingerprint(
                kv_caches, model.ops.numerics, layout.places, num_kv_heads
            ),
            is_asynchronous=device.is_asynchronous,
            architecture=model.spec.architecture,
            device=device.name,
            num_threads=torch.get_num_threads(),
            num_parameters=num_parameters(model.spec),
            weights=model.weights,
            draft_model=draft_model,
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

    @torch.inference_mode()
    def submit(self, step: SchedulerOutput) -> None:
        """Ask the device for the step's parts in their order, those that there are."""
        self._check(step)
        dropped = self._adapters.change(step.drop_adapters, step.add_adapters)
        saved = self._transfer.gather(step.kv_saves)
        self._transfer.scatter(step.kv_loads)
        batch = self._runner.submit(step.requests)
        end = self._device.record_event()
        self._submitted.append(SubmittedStep(step.step_id, batch, saved, dropped, end))

    def has_ended(self) -> bool:
        """Whether the device is done with the oldest step that was not collected yet."""
        return self._submitted[0].end.is_done()

    @torch.inference_mode()
    def collect(self) -> ModelRunnerOutput:
        """What came out of the oldest step that was not collected yet; waits for all of it."""
        step = self._submitted.popleft()
        step.end.wait()
        results = step.batch.results()
        if self._draft_model is not None and results:
            results = self._with_guesses(self._draft_model, step.batch.requests, results)
            self._drawn = results
        return ModelRunnerOutput(step.step_id, results, step.saved.rows())

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
        adapters = (one.adapter for one in step.requests if one.adapter is not BASE_MODEL)
        num_loras = len({adapter.digest for adapter in adapters})
        assert len(step.requests) <= self._max_num_seqs, f"step of {len(step.requests)} requests"
        assert step.num_tokens <= self._max_num_batched_tokens, f"step of {step.num_tokens} tokens"
        assert num_loras <= self._lora.max_loras, f"step of {num_loras} adapters"

    def _kv_layout(self, model: LoadedModel, place: RankPlace) -> KVLayout:
        return kv_layout([spec.of_rank(place) for spec in model.spec.kv_specs()])

    def _num_kv_blocks(self, model: LoadedModel, layout: KVLayout, free_bytes: int) -> int:
        """Count those that this rank has room for, if others have as much for each of their heads.

        free_bytes: before the model was loaded.
        """
        each = [self._kv_block_bytes(model, self._kv_layout(model, p)) for p in self._place.all()]
        block_bytes, parts = sum(each), sum(each) / each[self._place.rank]
        if model.device.counts_memory:
            memory = self._warm_up(model, layout, free_bytes)
            find_room = partial(_gpu_room, model.device, memory, parts)
        else:
            find_room = partial(self._cpu_room, model, layout, block_bytes, parts)
        return num_kv_blocks(self._cache, block_bytes, find_room, self._draft_blocks(parts))

    def _draft_blocks(self, parts: float = 1.0) -> DraftBlocks:
        """The draft model's, which take memory of this rank alone. parts: as of `_cpu_room`."""
        if self._draft_model is None:
            return NO_DRAFT_BLOCKS
        blocks = self._draft_model.blocks
        return replace(blocks, block_bytes=int(blocks.block_bytes * parts))

    def _kv_block_bytes(self, model: LoadedModel, layout: KVLayout) -> int:
        return kv_block_bytes(layout.cache_specs, model.ops, self._cache.block_size, model.dtype)

    def _kv_caches(self, model: LoadedModel, layout: KVLayout, num_blocks: int) -> list[Tensor]:
        block_size = self._cache.block_size
        return allocate_kv_caches(
            layout.cache_specs, model.ops, num_blocks, block_size, model.dtype
        )

    def _cpu_room(
        self, model: LoadedModel, layout: KVLayout, block_bytes: int, parts: float
    ) -> Room:
        """What there is for the KV of all ranks. parts: how many times this rank's that is."""
        in_flight = 2 * self._max_num_batched_tokens  # where steps overlap
        needs = KVNeeds(layout.groups, self._cache.block_size, in_flight)
        most_blocks = self._max_num_seqs * needs.blocks_of_request(model.max_model_len)
        free_bytes = model.device.free_bytes()
        if self._node_free_bytes is not None:
            free_bytes = min(free_bytes, int(self._node_free_bytes() * parts))
        utilization = self._cache.gpu_memory_utilization
        draft = self._draft_blocks()
        most_bytes = most_blocks * block_bytes + draft.most * draft.block_bytes
        return cpu_room(free_bytes, utilization, most_bytes)

    def _warm_up(self, model: LoadedModel, layout: KVLayout, free_bytes: int) -> GpuMemory:
        """Run the largest steps: all kernels are compiled for them, and their memory is measured.

        free_bytes: before the model was loaded.
        """
        device, lora = model.device, self._lora
        weight_bytes = free_bytes - device.free_bytes()
        kv_caches = self._kv_caches(model, layout, 1)
        runner = self._settings.runner(model, layout, kv_caches, self._adapters, None, self._group)
        with self._largest_adapter(model) as adapter:
            steps = largest_steps(self._step_limits(model, layout), adapter)
            peaks = [device.peak_bytes(partial(runner.submit, step)) for step in steps]
        recorder = self._settings.recorder(model, layout, kv_caches)
        graph_bytes = device.peak_bytes(recorder.largest()) if recorder is not None else 0
        if self._draft_model is not None:
            step_bytes, its_graph_bytes = self._draft_model.measure()
            peaks.append(step_bytes)
            graph_bytes += its_graph_bytes
        itemsize = model.dtype.itemsize
        linears, experts = self._linears_and_experts()
        adapter_bytes = largest_adapter_bytes(linears, lora.max_lora_rank, itemsize)
        adapter_bytes += largest_adapter_bytes(experts, lora.max_lora_expert_rank or 0, itemsize)
        adapter_bytes += largest_vocabulary_bytes(
            model.vocabulary, lora.max_lora_rank, itemsize, lora.max_lora_vocab_bytes
        )
        return GpuMemory(
            free=free_bytes,
            utilization=self._cache.gpu_memory_utilization,
            weights=weight_bytes,
            step=max(peaks),
            graphs=graph_bytes,  # all of a model share the memory of the largest
            # While one is packed, its tensors are there a second time.
            adapters=(lora.cpu_lora_limit + 1) * adapter_bytes if lora.enable_lora else 0,
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

    def _step_limits(self, model: LoadedModel, layout: KVLayout) -> StepLimits:
        return StepLimits(
            max_num_seqs=self._max_num_seqs,
            max_num_batched_tokens=self._max_num_batched_tokens,
            max_model_len=model.max_model_len,
            max_logprobs=self._config.max_logprobs,
            vocab_size=model.spec.vocab_size,
            block_size=self._cache.block_size,
            num_groups=len(layout.groups),
            max_draft_rows=self._max_draft_rows,
        )

    def _linears_and_experts(self) -> tuple[list[LinearLayout], list[LinearLayout]]:
        """What this rank computes of the linear layers that adapters may change."""
        own = [linear.of_rank(self._place) for linear in self.linears]
        experts = [linear for linear in own if linear.expert is not None]
        return [linear for linear in own if linear.expert is None], experts

    @contextmanager
    def _largest_adapter(self, model: LoadedModel) -> Iterator[AdapterRef | NoAdapter]:
        """Keep the largest adapter on the device meanwhile, if adapters are served at all."""
        if not self._lora.enable_lora:
            yield BASE_MODEL
            return
        linears, experts = self._linears_and_experts()
        of_vocabulary = vocabulary_linears(model.vocabulary)
        linears += [layout.of_rank(self._place) for layout in of_vocabulary]
        adapter = largest_adapter(
            lora_modules(linears),
            self._lora.max_lora_rank,
            model.vocabulary,
            lora_modules(experts),
            self._lora.max_lora_expert_rank or 0,
        )
        self._adapters.prepare(adapter)
        self._adapters.change((), (adapter.digest,))
        yield AdapterRef(adapter.path, adapter.digest)
        self._adapters.change((adapter.digest,), ())


def _gpu_room(device: Device, memory: GpuMemory, parts: float) -> Room:
    """What there is for the KV of all ranks. parts: how many times this rank's that is."""
    room = memory.room()
    logger.info("%s: %s leaves %d bytes for KV", device.name, memory, room.num_bytes)
    return replace(room, num_bytes=int(room.num_bytes * parts))
