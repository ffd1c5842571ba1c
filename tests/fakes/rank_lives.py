"""What ranks are held against each other by: all that comes out of some requests."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.distributed.group import ALONE
from lora_serve.engine.core.executor import Executor
from lora_serve.identity import BASE_MODEL, AdapterRef, NoAdapter
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import (
    AskedOutputs,
    ModelRunnerOutput,
    PromptScoring,
    SampleInput,
    ScheduledRequest,
    SchedulerOutput,
)
from tests.fakes.ranks import make_rank, start_threads
from tests.fakes.tiny_models import VOCAB_SIZE

BLOCKS = 5  # of each request, of each group
GREEDY = SamplingParams(temperature=0.0, logprobs=VOCAB_SIZE)
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, repetition_penalty=1.2, logprobs=3)


def whole(model: Path, **settings: Any) -> Executor:
    return make_rank(model, ALONE, **settings)


def divided(model: Path, world_size: int, **settings: Any) -> Executor:
    return start_threads(world_size, lambda group: make_rank(model, group, **settings))


def prompt_of(index: int, length: int) -> list[int]:
    return [(7 * i + 13 * index + 1) % VOCAB_SIZE for i in range(length)]


def chunk(
    index: int,
    tokens: list[int],
    start: int,
    adapter: AdapterRef | NoAdapter,
    params: SamplingParams | None,
    num_groups: int,
) -> ScheduledRequest:
    """Tokens of request `index`, after whose last one is drawn if there are params."""
    end = start + len(tokens)
    num_blocks = math.ceil(end / 16)
    samples = () if params is None else (SampleInput(params, seed=index, position=end),)
    scoring = PromptScoring(tokens[1:], 2) if start == 0 and index == 0 else None
    return ScheduledRequest(
        f"request-{index}",
        adapter,
        start,
        tokens,
        [
            [BLOCKS * (index * num_groups + group) + place for place in range(num_blocks)]
            for group in range(num_groups)
        ],
        AskedOutputs(samples, scoring, num_pooled=int(index == 1)),
    )


def life(executor: Executor, adapters: list[AdapterCheckpoint]) -> list[ModelRunnerOutput]:
    """All that comes out of prefills in two chunks and of six decodes, and KV after some."""
    num_groups = len(executor.load().kv_groups)
    for adapter in adapters:
        executor.prepare_adapter(adapter)
    add = tuple(adapter.digest for adapter in adapters)
    owners = [BASE_MODEL, *(AdapterRef("a", digest) for digest in add), *[BASE_MODEL] * 3]
    prompts = [prompt_of(i, length) for i, length in enumerate((30, 17, 50, 3))]
    all_params = [GREEDY, GREEDY, DRAWN, GREEDY]
    tokens, ends = [list(prompt) for prompt in prompts], [20, 17, 20, 3]
    starts = [0] * 4
    outputs = []
    for step_id in range(8):
        requests = tuple(
            chunk(
                i,
                known[start:end],
                start,
                owners[i],
                all_params[i] if end == len(known) else None,
                num_groups,
            )
            for i, (known, start, end) in enumerate(zip(tokens, starts, ends, strict=True))
        )
        saves = tuple(BLOCKS * group for group in range(num_groups)) if step_id == 5 else ()
        executor.submit(SchedulerOutput(step_id, requests, (), add, saves))
        outputs.append(executor.collect())
        for known, result in zip(tokens, outputs[-1].requests, strict=True):
            known += result.token_ids
        starts, ends, add = ends, [len(known) for known in tokens], ()
    executor.close()
    return outputs
