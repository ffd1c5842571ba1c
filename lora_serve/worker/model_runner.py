"""Runs one batch: forward, then what is asked of it. Results come in the step's own order.

A batch is submitted, and its results are asked for later: the next batch may have been submitted
by then, and take the tokens that this one draws from where they were drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from lora_serve.distributed.group import ALONE, Group, broadcast
from lora_serve.host_copies import HostCopy
from lora_serve.layers.vocabulary import HeadChanges
from lora_serve.models.base import Model
from lora_serve.sampling.contract import SampledToken, Sampler, SamplerOutput
from lora_serve.sampling.host import HostSamplerOutput
from lora_serve.sampling.lm_head_screening import LMHeadScreening
from lora_serve.step import (
    RequestStepOutput,
    ScheduledRequest,
    TokenLogprobs,
    accepted,
)
from lora_serve.worker.adapter_weights import AdapterWeights
from lora_serve.worker.batch_builder import BatchBuilder
from lora_serve.worker.batch_rows import BatchRows, PendingTokens
from lora_serve.worker.device import Device
from lora_serve.worker.pooling import pooled_rows, summed_rows
from lora_serve.worker.step_graphs import StepGraphs

LOGITS_ROWS_AT_ONCE = 256  # 150 MB for a vocabulary of 151,936
NOTHING_SAMPLED = HostSamplerOutput(())
NOTHING_GIVEN = RequestStepOutput()


class SubmittedBatch(msgspec.Struct, frozen=True, eq=False, gc=False):
    """All by index in the step.

    requests: of the step. places: where `sampled` has the first of a request's tokens.
    prompt_logprobs, pooled, hidden_sums: of the requests that ask for them.
    """

    requests: Sequence[ScheduledRequest] = ()
    places: dict[int, int] = {}
    sampled: SamplerOutput = NOTHING_SAMPLED
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = {}
    pooled: dict[int, HostCopy] = {}
    hidden_sums: dict[int, HostCopy] = {}

    def results(self) -> tuple[RequestStepOutput, ...]:
        """Wait for the results; they are in the step's order."""
        tokens, places = self.sampled.wait(), self.places
        results = [
            self._drawn(request, places[index], tokens) if index in places else NOTHING_GIVEN
            for index, request in enumerate(self.requests)
        ]
        for index, told in self.prompt_logprobs.items():
            results[index] = replace(results[index], prompt_logprobs=told)
        for index, copy in self.pooled.items():
            results[index] = replace(results[index], pooled=copy.wait().numpy().tobytes())
        for index, copy in self.hidden_sums.items():
            results[index] = replace(results[index], hidden_sums=copy.wait().numpy().tobytes())
        return tuple(results)

    def _drawn(
        self, request: ScheduledRequest, place: int, tokens: Sequence[SampledToken]
    ) -> RequestStepOutput:
        """What was sampled for a request, whose first token is at this place."""
        num_samples = len(request.asked.samples)
        if num_samples == 1:  # the usual case
            token_id, logprobs = tokens[place]
            return RequestStepOutput((token_id,), () if logprobs is None else (logprobs,))
        sampled = tokens[place : place + num_samples]
        token_ids = accepted([token_id for token_id, _ in sampled], request.draft_token_ids)
        told = [each for _, each in sampled[: len(token_ids)]]
        return RequestStepOutput(token_ids, tuple([each for each in told if each is not None]))


class ModelRunner:
    """screening: finds some greedy tokens without logits; None where the LM head is not screened.

    graphs: recorded steps over the same KV caches, or None to run all steps eagerly. group: of
    which the first rank draws tokens for all.
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
        group: Group = ALONE,
    ) -> None:
        self._device = device
        self._model = model
        self._sampler = sampler
        self._screening = screening
        self._kv_caches = kv_caches
        self._builder = builder
        self._adapters = adapters
        self._graphs = graphs
        self._group = group
        self._last = SubmittedBatch()  # of those that had requests

    def submit(self, requests: Sequence[ScheduledRequest]) -> SubmittedBatch:
        """Ask the device for a batch, whose results may be waited for later."""
        if not requests:
            return SubmittedBatch()
        adapters = self._adapters
        rows = self._builder.lay_out(
            requests,
            adapters.__getitem__,
            adapters.embedding_changes,
            adapters.biases,
            adapters.experts,
        )
        hidden = self._forward(rows)
        samplers = [requests[index] for index in rows.samplers]
        sampled = self._sample(samplers, self._sampled_rows(rows, hidden))
        ends = accumulate([len(request.asked.samples) for request in samplers], initial=0)
        prompt_logprobs, pooled, hidden_sums = {}, {}, {}
        for place, index in enumerate(rows.order):
            asked = requests[index].asked
            if not asked.takes_hidden:
                continue
            start, end = rows.output_start_loc[place : place + 2]
            if asked.scoring is not None:
                prompt_logprobs[index] = self._prompt_logprobs(requests[index], hidden[start:end])
            if asked.num_pooled:
                pooled[index] = pooled_rows(hidden[end - asked.num_pooled : end])
            if asked.sums_hidden:
                hidden_sums[index] = summed_rows(hidden[start:end])
        places = dict(zip(rows.samplers, ends, strict=False))
        self._last = SubmittedBatch(requests, places, sampled, prompt_logprobs, pooled, hidden_sums)
        return self._last

    def _forward(self, rows: BatchRows) -> Tensor:
        """The hidden states asked for."""
        pending = self._pending_tokens(rows)
        hidden = None if self._graphs is None else self._graphs.run(rows, pending)
        if hidden is not None:
            return hidden
        return self._model.forward(self._builder.to_device(rows, pending), self._kv_caches)

    def _sampled_rows(self, rows: BatchRows, hidden: Tensor) -> Tensor:
        """Pick the hidden states that are sampled from.

        In most steps these are all, and nothing is picked out: on CPUs torch's indexing would wake
        its own threads, which spin where the kernels' threads compute; a GPU would wait for the
        indices.
        """
        if rows.all_sample:
            return hidden
        host = torch.from_numpy(np.array(rows.logits_indices, np.int64))
        indices = self._device.upload(host)
        return hidden.index_select(0, indices)

    def _pending_tokens(self, rows: BatchRows) -> PendingTokens | None:
        """The inputs that the batch before draws, or drew."""
        if not rows.token_sources:
            return None
        places = [self._last.places[source] for source in rows.token_sources]
        table = self._device.upload(torch.from_numpy(np.array((rows.pending_rows, places))))
        token_ids = broadcast(self._group, self._last.sampled.token_ids[table[1]])
        return PendingTokens(table[0], token_ids)

    def _sample(self, requests: Sequence[ScheduledRequest], hidden: Tensor) -> SamplerOutput:
        """The tokens that requests ask for, one of each hidden state."""
        inputs = [item for request in requests for item in request.asked.samples]
        if not inputs:
            return NOTHING_SAMPLED
        changes: HeadChanges = ()
        if self._adapters.head_changes:
            counts = [len(request.asked.samples) for request in requests]
            changes = self._adapters.head_changes_of(requests, counts)
        # A screen knows the model's own LM head alone.
        if self._screening is not None and not changes:
            screened = self._screening.sample(hidden, inputs)
            if screened is not None:
                return screened
        pending = self._uncounted_tokens(requests)
        return self._sampler.sample(self._model.logits(hidden, changes), inputs, pending)

    def _uncounted_tokens(self, requests: Sequence[ScheduledRequest]) -> Tensor | None:
        """The pending tokens that penalties ask for, as `Sampler.sample` takes them."""
        places = [
            self._last.places[request.token_from]
            if request.token_from is not None and item.params.has_penalties
            else -1
            for request in requests
            for item in request.asked.samples
        ]
        if max(places) < 0:
            return None
        there = self._device.upload(torch.tensor(places))
        tokens = self._last.sampled.token_ids[there.clamp(min=0)]
        return torch.where(there < 0, -1, tokens)

    def _prompt_logprobs(
        self, request: ScheduledRequest, hidden: Tensor
    ) -> tuple[TokenLogprobs, ...]:
        """The logprobs of the tokens that a chunk's hidden states predict."""
        scoring = request.asked.scoring
        assert scoring is not None, "asked for none"
        found: list[TokenLogprobs] = []
        for start in range(0, len(scoring.target_ids), LOGITS_ROWS_AT_ONCE):
            wanted = scoring.target_ids[start : start + LOGITS_ROWS_AT_ONCE]
            changes = self._adapters.head_changes_of([request], [len(wanted)])
            logits = self._model.logits(hidden[start : start + len(wanted)], changes)
            # The sampler waits for the card itself, which may wait in vain for a rank.
            self._device.record_event().wait()
            found += self._sampler.token_logprobs(logits, wanted, scoring.num_top)
        return tuple(found)
