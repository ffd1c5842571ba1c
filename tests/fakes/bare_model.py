"""A model with its KV pool and nothing around it: steps in, logits of every row out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.config.model import AUTO
from lora_serve.identity import BASE_MODEL, AdapterRef, NoAdapter
from lora_serve.models.base import ModelSpec
from lora_serve.models.source import load_spec
from lora_serve.models.weights import WeightReader, open_weights
from lora_serve.ops.contract import Ops
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import SampleInput, ScheduledRequest
from lora_serve.worker.adapter_weights import AdapterWeights
from lora_serve.worker.batch_builder import BatchBuilder
from lora_serve.worker.device import CpuDevice, Device
from lora_serve.worker.kv_cache import allocate_kv_caches
from lora_serve.worker.loaded_model import vocabulary_of
from tests.fakes.asked import scoring

BLOCK_SIZE = 16
SAMPLE = SampleInput(SamplingParams(), seed=0, position=0)


class BareModel:
    """KV is NaN until written. ops: of the same device. change_spec: of what the config says."""

    def __init__(
        self,
        directory: Path,
        ops: Ops,
        dtype: torch.dtype,
        num_blocks: int = 64,
        device: Device | None = None,
        change_spec: Callable[[Any], ModelSpec] = lambda spec: spec,
        model_impl: str = AUTO,
        *,
        keeps_codes: bool = False,
    ) -> None:
        device = device or CpuDevice()
        self.spec = change_spec(load_spec(directory, AUTO, model_impl))
        source = open_weights(directory, self.spec, AUTO, 0, dtype)
        weights = WeightReader(source, dtype, device.torch_device, keeps_codes=keeps_codes)
        tables = self.spec.rotary_tables(self.spec.max_positions)
        tables = [table.to(device.torch_device) for table in tables]
        self.model = self.spec.build(weights, ops, tables)
        self.kept_codes = weights.kept
        self.vocabulary = vocabulary_of(self.spec, dtype, weights)
        self.adapters = AdapterWeights(
            [*self.spec.linears(), *self.spec.expert_linears()],
            ops,
            device,
            dtype,
            self.vocabulary,
            weights.biases,
        )
        self.kv_caches = allocate_kv_caches(
            self.spec.kv_specs(), ops, num_blocks, BLOCK_SIZE, dtype
        )
        group_of = [0] * len(self.kv_caches)
        self.builder = BatchBuilder(ops, device, BLOCK_SIZE, self.spec.hidden_size, dtype, group_of)
        self.poison()

    def poison(self) -> None:
        for cache in self.kv_caches:
            cache.fill_(torch.nan)

    def add_adapter(self, checkpoint: AdapterCheckpoint) -> AdapterRef:
        self.adapters.prepare(checkpoint)
        self.adapters.change((), (checkpoint.digest,))
        return AdapterRef(checkpoint.path, checkpoint.digest)

    def step(self, requests: Sequence[ScheduledRequest]) -> list[Tensor]:
        """The logits (num_tokens, V) of each request's rows."""
        asking = [replace(r, asked=scoring(r.token_ids)) for r in requests]
        return self.asked_logits(asking)

    @torch.inference_mode()
    def asked_logits(self, requests: Sequence[ScheduledRequest]) -> list[Tensor]:
        """The logits of the rows that each request asks for: none, the last, or all."""
        adapters = self.adapters
        rows = self.builder.lay_out(
            requests,
            adapters.__getitem__,
            adapters.embedding_changes,
            adapters.biases,
            adapters.experts,
        )
        hidden = self.model.forward(self.builder.to_device(rows), self.kv_caches)
        # All rows at once, those of each adapter side by side, as samplers ask for them.
        ordered = [requests[index] for index in rows.order]
        counts = [end - start for start, end in pairwise(rows.output_start_loc)]
        logits_of_all = self.model.logits(hidden, adapters.head_changes_of(ordered, counts))
        logits = dict(zip(rows.order, logits_of_all.split(counts), strict=True))
        return [logits[index] for index in range(len(requests))]


class Prompt:
    """One request's tokens and blocks; `chunk` makes steps of it."""

    def __init__(
        self,
        token_ids: Sequence[int],
        block_ids: Sequence[int],
        adapter: AdapterRef | NoAdapter = BASE_MODEL,
    ) -> None:
        self.token_ids = list(token_ids)
        self.block_ids = list(block_ids)
        self.adapter = adapter

    def chunk(self, start: int, end: int) -> ScheduledRequest:
        return ScheduledRequest(
            request_id="r",
            adapter=self.adapter,
            start=start,
            token_ids=self.token_ids[start:end],
            block_tables=[self.block_ids[: -(-end // BLOCK_SIZE)]],
        )

    def alone(self, model: BareModel, chunk: int = 10_000) -> Tensor:
        """Logits of all its rows from poisoned memory, in chunks of one size."""
        model.poison()
        length = len(self.token_ids)
        steps = range(0, length, chunk)
        return torch.cat([model.step([self.chunk(s, min(s + chunk, length))])[0] for s in steps])
