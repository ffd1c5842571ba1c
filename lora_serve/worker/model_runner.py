"""Runs one batch: forward, sampling, prompt logprobs. Results come in the step's own order.

A batch is submitted, and its results are asked for later: the next batch may have been submitted
by then, and take the tokens that this one draws from where they were drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lora_serve.models.base import Model
from lora_serve.sampling.contract import Sampler, SamplerOutput
from lora_serve.sampling.host import HostSamplerOutput
from lora_serve.sampling.lm_head_screening import LMHeadScreening
from lora_serve.step import (
    RequestStepOutput,
    SampleInput,
    ScheduledRequest,
    TokenLogprobs,
)
from lora_serve.worker.adapter_weights import AdapterWeights
from lora_serve.worker.batch_builder import AwaitedTokens, BatchBuilder, BatchRows
from lora_serve.worker.cuda_graphs import StepGraphs
from lora_serve.worker.device import Device

LOGITS_ROWS_AT_ONCE = 256  # 150 MB for a vocabulary of 151,936


@dataclass(frozen=True, slots=True)
class SubmittedBatch:
    """places: by index in the step, where `sampled` has the request's token.

    prompt_logprobs: of all requests of the step, in its order.
    """

    places: Mapping[int, int]
    sampled: SamplerOutput
    prompt_logprobs: Sequence[tuple[TokenLogprobs, ...]]

    def results(self) -> tuple[RequestStepOutput, ...]:
        """In the step's order, once they are there."""
        tokens = self.sampled.wait()
        outputs = []
        for index, prompt_logprobs in enumerate(self.prompt_logprobs):
            place = self.places.get(index)
            token_id, logprobs = (None, None) if place is None else tokens[place]
            outputs.append(RequestStepOutput(token_id, logprobs, prompt_logprobs))
        return tuple(outputs)


NOTHING_SAMPLED = HostSamplerOutput(())


class ModelRunner:
    """screening: finds some greedy tokens without logits; None where the LM head is not screened.

    graphs: recorded steps over the same KV caches, or None to run all steps eagerly.
    """

    def __init__(
        self,
        device: Device,
        model: Model,
        sampler: Sampler,
        screening: LMHeadScreening | None,
        kv_caches: Sequence[Tensor],
        builder: BatchBuilder,
        adapters: AdapterWeights,
        graphs: StepGraphs | None = None,
    ) -> None:
        self._device = device
        self._model = model
        self._sampler = sampler
        self._screening = screening
        self._kv_caches = kv_caches
        self._builder = builder
        self._adapters = adapters
        self._graphs = graphs
        self._last = SubmittedBatch({}, NOTHING_SAMPLED, ())  # of those that had requests

    def submit(self, requests: Sequence[ScheduledRequest]) -> SubmittedBatch:
        """Ask the device for a batch, whose results may be waited for later."""
        if not requests:
            return SubmittedBatch({}, NOTHING_SAMPLED, ())
        rows = self._builder.lay_out(requests, self._adapters.__getitem__)
        hidden = self._forward(rows)
        sampled = self._sample(requests, rows.samplers, self._sampled_rows(rows, hidden))
        first_output = dict(zip(rows.order, rows.first_output, strict=True))
        prompt_logprobs = [
            self._prompt_logprobs(request, hidden, first_output[index])
            for index, request in enumerate(requests)
        ]
        places = {index: place for place, index in enumerate(rows.samplers)}
        self._last = SubmittedBatch(places, sampled, prompt_logprobs)
        return self._last

    def _forward(self, rows: BatchRows) -> Tensor:
        """The hidden states asked for."""
        awaited = self._awaited_tokens(rows)
        if self._graphs is not None and self._graphs.can_run(rows):
            return self._graphs.run(rows, awaited)
        return self._model.forward(self._builder.to_device(rows, awaited), self._kv_caches)

    def _sampled_rows(self, rows: BatchRows, hidden: Tensor) -> Tensor:
        """Pick the hidden states that are sampled from.

        In most steps these are all, and nothing is picked out: on CPUs torch's indexing would wake
        its own threads, which spin where the kernels' threads compute; a GPU would wait for the
        indices.
        """
        if rows.all_sample:
            return hidden
        indices = self._device.upload(torch.from_numpy(rows.logits_indices))
        return hidden.index_select(0, indices)

    def _awaited_tokens(self, rows: BatchRows) -> AwaitedTokens | None:
        """The tokens that the batch before draws, or drew, for rows of this one."""
        if not rows.token_sources:
            return None
        places = [self._last.places[source] for source in rows.token_sources]
        table = self._device.upload(torch.from_numpy(np.stack((rows.awaited_rows, places))))
        return AwaitedTokens(table[0], self._last.sampled.token_ids[table[1]])

    def _sample(
        self, requests: Sequence[ScheduledRequest], samplers: Sequence[int], hidden: Tensor
    ) -> SamplerOutput:
        """A token of each request that samples, by their indices, from its row's state."""
        inputs: list[SampleInput] = []
        for index in samplers:
            sample_input = requests[index].sample
            assert sample_input is not None, f"{requests[index].request_id} does not sample"
            inputs.append(sample_input)
        if not inputs:
            return NOTHING_SAMPLED
        screened = self._screening.sample(hidden, inputs) if self._screening is not None else None
        if screened is not None:
            return screened
        pending = self._pending_tokens([requests[index] for index in samplers], inputs)
        return self._sampler.sample(self._model.logits(hidden), inputs, pending)

    def _pending_tokens(
        self, requests: Sequence[ScheduledRequest], inputs: Sequence[SampleInput]
    ) -> Tensor | None:
        """The tokens that penalties do not count yet, as `Sampler.sample` takes them."""
        places = [
            self._last.places[request.token_from]
            if request.token_from is not None and item.params.has_penalties
            else -1
            for request, item in zip(requests, inputs, strict=True)
        ]
        if max(places) < 0:
            return None
        there = self._device.upload(torch.tensor(places))
        tokens = self._last.sampled.token_ids[there.clamp(min=0)]
        return torch.where(there < 0, -1, tokens)

    def _prompt_logprobs(
        self, request: ScheduledRequest, hidden: Tensor, first: int
    ) -> tuple[TokenLogprobs, ...]:
        """The logprobs of the tokens after the request's rows, which begin at hidden[first]."""
        targets = request.prompt_logprob_targets
        found: list[TokenLogprobs] = []
        for start in range(0, len(targets), LOGITS_ROWS_AT_ONCE):
            wanted = targets[start : start + LOGITS_ROWS_AT_ONCE]
            row = first + start
            logits = self._model.logits(hidden[row : row + len(wanted)])
            found += self._sampler.token_logprobs(logits, wanted, request.num_prompt_logprobs)
        return tuple(found)
