"""How many KV blocks one rank has, once its model is loaded: as many as its memory has room for.

On a GPU the largest steps are run to see what they leave, and so all kernels are compiled. On a CPU
it is a share of what is free.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from lora_serve.config import CacheConfig, LoRAConfig
from lora_serve.distributed.group import Group
from lora_serve.distributed.shares import RankPlace, place_of
from lora_serve.identity import BASE_MODEL, AdapterRef, NoAdapter
from lora_serve.kv_groups import KVNeeds
from lora_serve.models.base import LinearLayout, lora_modules, vocabulary_linears
from lora_serve.worker.adapter_weights import AdapterWeights
from lora_serve.worker.device import Device
from lora_serve.worker.draft_model import DraftModel
from lora_serve.worker.kv_cache import (
    NO_DRAFT_BLOCKS,
    DraftBlocks,
    allocate_kv_caches,
    kv_block_bytes,
    num_kv_blocks,
)
from lora_serve.worker.kv_layout import KVLayout, layout_of_rank
from lora_serve.worker.largest_steps import StepLimits, largest_adapter, largest_steps
from lora_serve.worker.loaded_model import LoadedModel
from lora_serve.worker.memory import (
    GpuMemory,
    Room,
    cpu_room,
    largest_adapter_bytes,
    largest_vocabulary_bytes,
)
from lora_serve.worker.runners import RunnerSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSizing:
    """What the number of blocks follows from.

    linears: what this rank computes of those that adapters may change. adapters: of the rank, none
    of which it has yet. node_free_bytes, draft_model: as of Worker.
    """

    model: LoadedModel
    settings: RunnerSettings
    cache: CacheConfig
    lora: LoRAConfig
    max_logprobs: int
    linears: Sequence[LinearLayout]
    adapters: AdapterWeights
    group: Group
    node_free_bytes: Callable[[], int] | None
    draft_model: DraftModel | None

    def num_blocks(self, free_bytes: int) -> int:
        """Count those that this rank has room for, if others have as much for each of their heads.

        free_bytes: before the model was loaded.
        """
        place = place_of(self.group)
        each = [self._block_bytes(rank) for rank in place.all()]
        block_bytes, parts = sum(each), sum(each) / each[place.rank]
        if self.model.device.counts_memory:
            memory = self._measured(self._layout(place), free_bytes)
            find_room = partial(_gpu_room, self.model.device, memory, parts)
        else:
            find_room = partial(self._cpu_room, self._layout(place), block_bytes, parts)
        return num_kv_blocks(self.cache, block_bytes, find_room, self._draft_blocks(parts))

    def _layout(self, place: RankPlace) -> KVLayout:
        return layout_of_rank(self.model.spec.kv_specs(), place)

    def _block_bytes(self, place: RankPlace) -> int:
        specs, model = self._layout(place).cache_specs, self.model
        return kv_block_bytes(specs, model.ops, self.cache.block_size, model.dtype)

    def _draft_blocks(self, parts: float = 1.0) -> DraftBlocks:
        """The draft model's, which take memory of this rank alone. parts: as of `_cpu_room`."""
        if self.draft_model is None:
            return NO_DRAFT_BLOCKS
        blocks = self.draft_model.blocks
        return replace(blocks, block_bytes=int(blocks.block_bytes * parts))

    def _cpu_room(self, layout: KVLayout, block_bytes: int, parts: float) -> Room:
        """What there is for the KV of all ranks. parts: how many times this rank's that is."""
        in_flight = 2 * self.settings.max_num_batched_tokens  # where steps overlap
        needs = KVNeeds(layout.groups, self.cache.block_size, in_flight)
        longest = needs.blocks_of_request(self.model.max_model_len)
        free_bytes = self.model.device.free_bytes()
        if self.node_free_bytes is not None:
            free_bytes = min(free_bytes, int(self.node_free_bytes() * parts))
        draft = self._draft_blocks()
        most_bytes = self.settings.max_num_seqs * longest * block_bytes
        most_bytes += draft.most * draft.block_bytes
        return cpu_room(free_bytes, self.cache.gpu_memory_utilization, most_bytes)

    # ── what is measured ────────────────────────────────────────────────────────────────────

    def _measured(self, layout: KVLayout, free_bytes: int) -> GpuMemory:
        """Run the largest steps: all kernels are compiled for them, and their memory is measured.

        free_bytes: before the model was loaded.
        """
        model, device = self.model, self.model.device
        weight_bytes = free_bytes - device.free_bytes()
        kv_caches = allocate_kv_caches(
            layout.cache_specs, model.ops, 1, self.cache.block_size, model.dtype
        )
        runner = self.settings.runner(model, layout, kv_caches, self.adapters, None, self.group)
        with self._largest_adapter() as adapter:
            steps = largest_steps(self._step_limits(layout), adapter)
            peaks = [device.peak_bytes(partial(runner.submit, step)) for step in steps]
        recorder = self.settings.recorder(model, layout, kv_caches)
        graph_bytes = device.peak_bytes(recorder.largest()) if recorder is not None else 0
        if self.draft_model is not None:
            step_bytes, its_graph_bytes = self.draft_model.measure()
            peaks.append(step_bytes)
            graph_bytes += its_graph_bytes
        return GpuMemory(
            free=free_bytes,
            utilization=self.cache.gpu_memory_utilization,
            weights=weight_bytes,
            step=max(peaks),
            graphs=graph_bytes,  # all of a model share the memory of the largest
            adapters=self._adapter_bytes(),
        )

    def _adapter_bytes(self) -> int:
        """What as many of the largest adapters take as may be resident."""
        lora, itemsize = self.lora, self.model.dtype.itemsize
        if not lora.enable_lora:
            return 0
        linears, experts = self._linears_and_experts()
        each = largest_adapter_bytes(linears, lora.max_lora_rank, itemsize)
        each += largest_adapter_bytes(experts, lora.max_lora_expert_rank or 0, itemsize)
        each += largest_vocabulary_bytes(
            self.model.vocabulary, lora.max_lora_rank, itemsize, lora.max_lora_vocab_bytes
        )
        return (lora.cpu_lora_limit + 1) * each  # while one is packed, its tensors are there twice

    def _step_limits(self, layout: KVLayout) -> StepLimits:
        return StepLimits(
            max_num_seqs=self.settings.max_num_seqs,
            max_num_batched_tokens=self.settings.max_num_batched_tokens,
            max_model_len=self.model.max_model_len,
            max_logprobs=self.max_logprobs,
            vocab_size=self.model.spec.vocab_size,
            block_size=self.cache.block_size,
            num_groups=len(layout.groups),
            max_draft_rows=self.settings.max_draft_rows,
        )

    def _linears_and_experts(self) -> tuple[list[LinearLayout], list[LinearLayout]]:
        experts = [linear for linear in self.linears if linear.expert is not None]
        return [linear for linear in self.linears if linear.expert is None], experts

    @contextmanager
    def _largest_adapter(self) -> Iterator[AdapterRef | NoAdapter]:
        """Keep the largest adapter on the device meanwhile, if adapters are served at all."""
        if not self.lora.enable_lora:
            yield BASE_MODEL
            return
        vocabulary, place = self.model.vocabulary, place_of(self.group)
        linears, experts = self._linears_and_experts()
        linears += [layout.of_rank(place) for layout in vocabulary_linears(vocabulary)]
        adapter = largest_adapter(
            lora_modules(linears),
            self.lora.max_lora_rank,
            vocabulary,
            lora_modules(experts),
            self.lora.max_lora_expert_rank or 0,
        )
        self.adapters.prepare(adapter)
        self.adapters.change((), (adapter.digest,))
        yield AdapterRef(adapter.path, adapter.digest)
        self.adapters.change((adapter.digest,), ())


def _gpu_room(device: Device, memory: GpuMemory, parts: float) -> Room:
    """What there is for the KV of all ranks. parts: how many times this rank's that is."""
    room = memory.room()
    logger.info("%s: %s leaves %d bytes for KV", device.name, memory, room.num_bytes)
    return replace(room, num_bytes=int(room.num_bytes * parts))
