"""Measures how long steps take by their rows, before any request has come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from msgspec import structs

from lora_serve.config import EngineConfig
from lora_serve.engine.core.executor import Executor
from lora_serve.identity import BASE_MODEL
from lora_serve.model_info import ModelInfo
from lora_serve.sampling_params import SamplingParams
from lora_serve.speculation.row_costs import RowCosts
from lora_serve.step import (
    AskedOutputs,
    DraftChunk,
    SampleInput,
    ScheduledRequest,
    SchedulerOutput,
)

logger = logging.getLogger(__name__)

_NUM_TIMES = 2  # that a step is timed; the shorter time counts
_MOST_SECONDS = 2.0  # for all; large models are measured up to fewer rows
_NUM_GUESSES = 4  # that the draft model is timed with
_GREEDY = SampleInput(SamplingParams(temperature=0.0), 0, 1)
# As checkpoints' generation_config.json often has it.
_DRAWN = SampleInput(SamplingParams(temperature=0.7, top_p=0.8, top_k=20), 0, 1)


def make_row_costs(config: EngineConfig, executor: Executor, model: ModelInfo) -> RowCosts | None:
    """Measure how long steps take by their rows, if drafts are guessed and the config allows it.

    Otherwise None: tokens that grammars force are worth their rows whatever these cost.
    """
    speculative = config.speculative
    if not (speculative.is_enabled and speculative.speculative_measure_row_costs):
        return None
    most_rows = min(speculative.max_draft_rows, config.scheduler.max_num_batched_tokens)
    return measured_row_costs(executor, model, config.cache.block_size, most_rows)


def measured_row_costs(
    executor: Executor,
    model: ModelInfo,
    block_size: int,
    most_rows: int,
    clock: Callable[[], float] = time.monotonic,
) -> RowCosts | None:
    """Run steps of 1, 2, 4 … rows, greedy and drawn; None if there is room for a single row.

    They are of one request and write to the first blocks, which no other has had yet. A
    draft model is measured, too.

    Args:
        most_rows: that a step with drafts may have.
        clock: of seconds.
    """
    room = block_size * (model.num_blocks // len(model.kv_groups))
    most_rows = min(most_rows, model.max_model_len, room)
    if most_rows < 2:
        return None
    begin = clock()
    greedy, drawn = list[tuple[int, float]](), list[tuple[int, float]]()
    for num_rows in _doubled(most_rows):
        for sample, measured in ((_GREEDY, greedy), (_DRAWN, drawn)):
            step = _step(model, block_size, num_rows, sample)
            measured.append((num_rows, _seconds(executor, step, clock)))
        if len(greedy) > 1 and clock() - begin > _MOST_SECONDS:
            break
    told = ", ".join(
        f"{rows} rows {1e3 * seconds:.2f} ms, drawn {1e3 * drawn_seconds:.2f} ms"
        for (rows, seconds), (_, drawn_seconds) in zip(greedy, drawn, strict=True)
    )
    logger.info("measured what verifying drafts costs: steps of %s", told)
    return RowCosts(greedy, _draft_seconds(executor, model, block_size, clock), drawn)


def _draft_seconds(
    executor: Executor, model: ModelInfo, block_size: int, clock: Callable[[], float]
) -> float:
    """How long the draft model takes for one more draft token; 0 without a draft model."""
    draft_model = model.draft_model
    few, many = 1, 1 + _NUM_GUESSES
    if draft_model is None or draft_model.max_model_len < 2 + many:
        return 0.0
    num_blocks = -(-(2 + many) // block_size)
    if draft_model.num_blocks < num_blocks:
        return 0.0
    tables = [
        range(group, num_blocks * draft_model.num_groups, draft_model.num_groups)
        for group in range(draft_model.num_groups)
    ]
    step = _step(model, block_size, 1, _GREEDY)
    seconds = [
        _seconds(executor, _with_draft_chunk(step, DraftChunk(0, [0], tables, count)), clock)
        for count in (few, many)
    ]
    found = max(0.0, seconds[1] - seconds[0]) / _NUM_GUESSES
    logger.info("the draft model takes %.2f ms for each draft token", 1e3 * found)
    return found


def _with_draft_chunk(step: SchedulerOutput, chunk: DraftChunk) -> SchedulerOutput:
    (request,) = step.requests
    return structs.replace(step, requests=(structs.replace(request, draft_chunk=chunk),))


def _seconds(executor: Executor, step: SchedulerOutput, clock: Callable[[], float]) -> float:
    """The shorter of the times that a step takes."""
    _run(executor, step)  # records it, and brings all to the caches
    times = []
    for _ in range(_NUM_TIMES):
        start = clock()
        _run(executor, step)
        times.append(clock() - start)
    return min(times)


def _doubled(most: int) -> Iterator[int]:
    """Numbers that double from 1 on, and the most."""
    num_rows = 1
    while num_rows < most:
        yield num_rows
        num_rows *= 2
    yield most


def _run(executor: Executor, step: SchedulerOutput) -> None:
    executor.submit(step)
    executor.collect()


def _step(model: ModelInfo, block_size: int, num_rows: int, sample: SampleInput) -> SchedulerOutput:
    """A step of one request, which samples each of its rows so."""
    num_blocks, num_groups = -(-num_rows // block_size), len(model.kv_groups)
    request = ScheduledRequest(
        request_id="rows",
        adapter=BASE_MODEL,
        start=0,
        token_ids=[0] * num_rows,
        block_tables=[
            range(group * num_blocks, (group + 1) * num_blocks) for group in range(num_groups)
        ],
        asked=AskedOutputs((sample,) * num_rows),
    )
    return SchedulerOutput(0, (request,))
