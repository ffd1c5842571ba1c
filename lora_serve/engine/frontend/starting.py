"""What an engine is started from: its process, the tokenizer, and what the checkpoint says."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from lora_serve.config import EngineConfig, ModelConfig
from lora_serve.engine.frontend.client import EngineClient
from lora_serve.engine.frontend.engine_process import EngineProcess
from lora_serve.engine.frontend.pooling_defaults import pooling_defaults
from lora_serve.messages import EngineReady
from lora_serve.pooling import PoolingParams
from lora_serve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StartedParts:
    """client: of a process that has loaded its model, as model_info tells."""

    client: EngineClient
    model_info: EngineReady
    tokenizer: Tokenizer
    pooling_defaults: PoolingParams


def begin_reading(config: ModelConfig) -> Future[Tokenizer]:
    """Read a model's tokenizer in a thread of its own."""
    executor = ThreadPoolExecutor(1, "tokenizer")
    source = config.tokenizer or config.model
    reading = executor.submit(Tokenizer, source, config.revision, model=config.model)
    executor.shutdown(wait=False)
    return reading


async def start_parts(
    config: EngineConfig,
    process: EngineProcess | None,
    tokenizer: Future[Tokenizer] | None = None,
) -> StartedParts:
    """Start an engine in `process`, or in a new one, and read the tokenizer, side by side.

    tokenizer: that `begin_reading` has begun to read already.

    Raises:
        ConfigError: the model cannot be served as asked.
    """
    client = EngineClient(process)
    try:
        async with asyncio.TaskGroup() as group:  # one that is refused does not wait for both
            reading = group.create_task(_result_of(tokenizer or begin_reading(config.model)))
            pooling = group.create_task(asyncio.to_thread(pooling_defaults, config.model))
            starting = group.create_task(client.start(config))
    except BaseException as error:  # also when the caller gives up: no process is left behind
        await client.close()
        raise _first_of(error) from error
    _warn_of_small_pool(starting.result())
    for warning in reading.result().warnings:
        logger.warning("%s", warning)
    return StartedParts(client, starting.result(), reading.result(), pooling.result())


async def _result_of(reading: Future[Tokenizer]) -> Tokenizer:
    return await asyncio.wrap_future(reading)


def _first_of(error: BaseException) -> BaseException:
    """The first of the errors that a group of tasks ended with; an error of no group as it is."""
    return error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error


def _warn_of_small_pool(model: EngineReady) -> None:
    """A pool that cannot hold the longest request serves, but refuses that one."""
    if model.max_request_tokens < model.max_model_len:
        logger.warning(
            "the KV cache holds requests of %d tokens (%d blocks), not of --max-model-len %d: "
            "longer ones will be refused; give it more memory, or lower --max-model-len to silence "
            "this",
            model.max_request_tokens,
            model.num_blocks,
            model.max_model_len,
        )
