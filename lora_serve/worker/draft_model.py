"""A second model that guesses what follows a step's tokens: greedily, without adapters, for speed.

It has weights, a KV pool and recorded steps of its own. What it guesses for a request hangs on that
request's tokens alone; which of its blocks hold what is the scheduler's to know.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeAlias

from torch import Tensor

from lora_serve.config import DraftModelConfig
from lora_serve.identity import BASE_MODEL
from lora_serve.model_info import DraftModelInfo
from lora_serve.models.base import num_parameters
from lora_serve.models.choices import check_draft_vocabulary
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import (
    NOTHING_ASKED,
    AskedOutputs,
    DraftChunk,
    SampleInput,
    ScheduledRequest,
    num_same,
)
from lora_serve.worker.adapter_weights import AdapterWeights
from lora_serve.worker.kv_cache import DraftBlocks, allocate_kv_caches, kv_block_bytes
from lora_serve.worker.kv_layout import kv_layout
from lora_serve.worker.largest_steps import StepLimits, largest_steps
from lora_serve.worker.loaded_model import LoadedModel, load_model
from lora_serve.worker.model_runner import ModelRunner
from lora_serve.worker.runners import RunnerSettings

# What is asked of it for a request, and the tokens that were drawn behind those that it names.
Guessing: TypeAlias = "tuple[DraftChunk, Sequence[int]]"

_GREEDY = AskedOutputs((SampleInput(SamplingParams(temperature=0.0), seed=0, position=0),))


class DraftModel:
    """Loads the model when it is made; guesses once it has its KV pool (`open`).

    served: the model whose tokens it guesses. block_size: of both KV pools.
    blocks: what its pool may take.
    """

    def __init__(self, config: DraftModelConfig, served: LoadedModel, block_size: int) -> None:
        self._config = config
        self._block_size = block_size
        self._model = model = load_model(
            config.model, served.device, block_size, most_tokens=served.max_model_len
        )
        check_draft_vocabulary(config.model.model, model.spec, served.spec)
        self._layout = kv_layout(model.spec.kv_specs())
        self._num_groups = len(self._layout.groups)
        page_bytes = kv_block_bytes(self._layout.cache_specs, model.ops, block_size, model.dtype)
        most_blocks = config.max_requests * -(-model.max_model_len // block_size)
        self.blocks = DraftBlocks(self._num_groups * page_bytes, most_blocks)
        self._settings = RunnerSettings(
            block_size=block_size,
            max_num_seqs=config.max_requests,
            max_num_batched_tokens=config.max_step_tokens,
            max_draft_rows=config.max_requests,
            enforce_eager=config.model.enforce_eager,
            most_recorded_rows=config.model.max_cudagraph_capture_size,
            with_lora=False,
        )
        self._adapters = AdapterWeights((), model.ops, model.device, model.dtype)
        self._runner: ModelRunner

    def measure(self) -> tuple[int, int]:
        """The most bytes that one of its steps takes, and what its recorded steps hold."""
        model, kv_caches = self._model, self._kv_caches(1)
        runner = self._settings.runner(model, self._layout, kv_caches, self._adapters, None)
        limits = StepLimits(
            max_num_seqs=self._config.max_requests,
            max_num_batched_tokens=self._config.max_step_tokens,
            max_model_len=model.max_model_len,
            max_logprobs=0,
            vocab_size=model.spec.vocab_size,
            block_size=self._block_size,
            num_groups=self._num_groups,
        )
        peak_bytes = model.device.peak_bytes
        steps = [peak_bytes(partial(runner.submit, step)) for step in largest_steps(limits)]
        recorder = self._settings.recorder(model, self._layout, kv_caches)
        return max(steps), 0 if recorder is None else peak_bytes(recorder.largest())

    def open(self, num_served_blocks: int) -> DraftModelInfo:
        """Make its KV pool, beside one of so many blocks of the model that is served."""
        model, num_blocks = self._model, self.blocks.num_blocks(num_served_blocks)
        kv_caches = self._kv_caches(num_blocks * self._num_groups)
        recorder = self._settings.recorder(model, self._layout, kv_caches)
        self._runner = self._settings.runner(
            model, self._layout, kv_caches, self._adapters, recorder
        )
        return DraftModelInfo(
            num_blocks,
            self._block_size,
            self._num_groups,
            model.max_model_len,
            kv_bytes=num_blocks * self.blocks.block_bytes,
            architecture=model.spec.architecture,
            num_parameters=num_parameters(model.spec),
            dtype=str(model.dtype).removeprefix("torch."),
            weights=model.weights,
        )

    def guess(self, asked: Sequence[Guessing]) -> list[tuple[int, ...]]:
        """What it guesses for each, as many tokens as its chunk says.

        It computes all that is new of all requests at once, then a token of each at a time.
        """
        rows = [_first_rows(*one) for one in asked]
        batches = [self._runner.submit(rows)]
        members = [[*range(len(asked))]]
        for count in range(1, max(chunk.num_drafts for chunk, _ in asked)):
            before = {index: place for place, index in enumerate(members[-1])}
            going_on = [i for i, (chunk, _) in enumerate(asked) if chunk.num_drafts > count]
            for index in going_on:
                rows[index] = _row_behind(rows[index], before[index])
            batches.append(self._runner.submit([rows[index] for index in going_on]))
            members.append(going_on)
        drafts: list[list[int]] = [[] for _ in asked]
        for batch, indices in zip(batches, members, strict=True):
            for index, result in zip(indices, batch.results(), strict=True):
                drafts[index] += result.token_ids
        return [tuple(each) for each in drafts]

    def _kv_caches(self, num_pages: int) -> list[Tensor]:
        specs, model = self._layout.cache_specs, self._model
        return allocate_kv_caches(specs, model.ops, num_pages, self._block_size, model.dtype)


def _first_rows(chunk: DraftChunk, drawn: Sequence[int]) -> ScheduledRequest:
    """What is to be computed of a request: the last row guesses, if anything is to be guessed."""
    start, token_ids, asked = chunk.start, chunk.token_ids, NOTHING_ASKED
    if chunk.num_drafts:
        # Those that it guessed right have their KV; the last token is computed again to go on.
        num_right = min(num_same(drawn, chunk.fed), len(drawn) - 1)
        start, token_ids = start + num_right, (*token_ids, *drawn[num_right:])
        asked = _GREEDY
    return ScheduledRequest("draft", BASE_MODEL, start, token_ids, chunk.block_tables, asked)


def _row_behind(rows: ScheduledRequest, place: int) -> ScheduledRequest:
    """The row of the token that `rows` drew, at that place of the batch before."""
    return ScheduledRequest(
        "draft", BASE_MODEL, rows.end, (0,), rows.block_tables, _GREEDY, token_from=place
    )
