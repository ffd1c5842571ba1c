"""Runs one batch: forward, sampling, prompt logprobs. Results come in the step's own order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lora_serve.models.decoder import Decoder
from lora_serve.ops import Ops
from lora_serve.step import (
    RequestStepOutput,
    SampleInput,
    ScheduledRequest,
    TokenLogprobs,
)
from lora_serve.worker.batch_builder import BatchBuilder, BatchRows
from lora_serve.worker.cuda_graphs import DecodeGraphs
from lora_serve.worker.device import Device
from lora_serve.worker.lora_slots import LoRASlots

LOGITS_ROWS_AT_ONCE = 256  # 150 MB for a vocabulary of 151,936


class ModelRunner:
    """graphs: recorded decode steps over the same KV caches, or None to run all steps eagerly."""

    def __init__(
        self,
        device: Device,
        decoder: Decoder,
        kv_caches: Sequence[Tensor],
        builder: BatchBuilder,
        adapters: LoRASlots,
        ops: Ops,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        self._device = device
        self._decoder = decoder
        self._kv_caches = kv_caches
        self._builder = builder
        self._adapters = adapters
        self._ops = ops
        self._graphs = graphs

    def run(self, requests: Sequence[ScheduledRequest]) -> tuple[RequestStepOutput, ...]:
        if not requests:
            return ()
        rows = self._builder.lay_out(requests, self._adapters.__getitem__)
        hidden, logits_indices = self._forward(rows)
        sampled = self._sample(requests, rows.samplers, hidden[logits_indices])
        first_row = dict(zip(rows.order, rows.first_row, strict=False))
        outputs = []
        for index, request in enumerate(requests):
            token_id, logprobs = sampled.get(index, (None, None))
            prompt_logprobs = self._prompt_logprobs(request, hidden[first_row[index] :])
            outputs.append(RequestStepOutput(token_id, logprobs, prompt_logprobs))
        return tuple(outputs)

    def _forward(self, rows: BatchRows) -> tuple[Tensor, Tensor]:
        """The rows' hidden states, and the indices of those whose logits are wanted."""
        if self._graphs is not None and self._graphs.can_run(rows):
            logits_indices = self._device.upload(torch.from_numpy(rows.logits_indices))
            return self._graphs.run(rows), logits_indices
        batch = self._builder.to_device(rows)
        return self._decoder.forward(batch, self._kv_caches), batch.logits_indices

    def _sample(
        self, requests: Sequence[ScheduledRequest], samplers: Sequence[int], hidden: Tensor
    ) -> dict[int, tuple[int, TokenLogprobs | None]]:
        """By index in the step: the token of each request that samples, from its row's state."""
        inputs: list[SampleInput] = []
        for index in samplers:
            sample_input = requests[index].sample
            assert sample_input is not None, f"{requests[index].request_id} does not sample"
            inputs.append(sample_input)
        if not inputs:
            return {}
        sampled = self._ops.sample(self._decoder.logits(hidden), inputs)
        return dict(zip(samplers, sampled, strict=True))

    def _prompt_logprobs(
        self, request: ScheduledRequest, hidden: Tensor
    ) -> tuple[TokenLogprobs, ...]:
        """Of the tokens after the request's rows, which `hidden` begins with."""
        targets = request.prompt_logprob_targets
        found: list[TokenLogprobs] = []
        for start in range(0, len(targets), LOGITS_ROWS_AT_ONCE):
            wanted = targets[start : start + LOGITS_ROWS_AT_ONCE]
            logits = self._decoder.logits(hidden[start : start + len(wanted)])
            found += self._ops.token_logprobs(logits, wanted, request.num_prompt_logprobs)
        return tuple(found)
