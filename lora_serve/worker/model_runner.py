"""Runs one batch: forward, sampling, prompt logprobs. Results come in the step's own order."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lora_serve.models.decoder import Decoder
from lora_serve.sampling.logprobs import token_logprobs
from lora_serve.sampling.sampler import sample
from lora_serve.step import (
    RequestStepOutput,
    SampleInput,
    ScheduledRequest,
    TokenLogprobs,
)
from lora_serve.worker.batch_builder import BatchBuilder, BuiltBatch
from lora_serve.worker.lora_slots import LoRASlots

LOGITS_ROWS_AT_ONCE = 256  # 150 MB for a vocabulary of 151,936


class ModelRunner:
    def __init__(
        self,
        decoder: Decoder,
        kv_caches: Sequence[Tensor],
        builder: BatchBuilder,
        adapters: LoRASlots,
    ) -> None:
        self._decoder = decoder
        self._kv_caches = kv_caches
        self._builder = builder
        self._adapters = adapters

    def run(self, requests: Sequence[ScheduledRequest]) -> tuple[RequestStepOutput, ...]:
        if not requests:
            return ()
        batch = self._builder.build(requests, self._adapters.__getitem__)
        hidden = self._decoder.forward(batch.forward, self._kv_caches)
        sampled = self._sample(requests, batch, hidden)
        first_row = dict(zip(batch.order, batch.first_row, strict=False))
        outputs = []
        for index, request in enumerate(requests):
            token_id, logprobs = sampled.get(index, (None, None))
            prompt_logprobs = self._prompt_logprobs(request, hidden[first_row[index] :])
            outputs.append(RequestStepOutput(token_id, logprobs, prompt_logprobs))
        return tuple(outputs)

    def _sample(
        self, requests: Sequence[ScheduledRequest], batch: BuiltBatch, hidden: Tensor
    ) -> dict[int, tuple[int, TokenLogprobs | None]]:
        """By index in the step: the token of each request that samples."""
        inputs: list[SampleInput] = []
        for index in batch.samplers:
            sample_input = requests[index].sample
            assert sample_input is not None, f"{requests[index].request_id} does not sample"
            inputs.append(sample_input)
        if not inputs:
            return {}
        logits = self._decoder.logits(hidden[batch.forward.logits_indices])
        return dict(zip(batch.samplers, sample(logits, inputs), strict=True))

    def _prompt_logprobs(
        self, request: ScheduledRequest, hidden: Tensor
    ) -> tuple[TokenLogprobs, ...]:
        """Of the tokens after the request's rows, which `hidden` begins with."""
        targets = request.prompt_logprob_targets
        found: list[TokenLogprobs] = []
        for start in range(0, len(targets), LOGITS_ROWS_AT_ONCE):
            wanted = targets[start : start + LOGITS_ROWS_AT_ONCE]
            logits = self._decoder.logits(hidden[start : start + len(wanted)])
            found += token_logprobs(logits, wanted, request.num_prompt_logprobs)
        return tuple(found)
