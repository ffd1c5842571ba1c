"""Where steps are executed. The engine sees this and no worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.config import EngineConfig
from lora_serve.errors import RankLostError
from lora_serve.model_info import ModelInfo
from lora_serve.step import ModelRunnerOutput, SchedulerOutput


class Executor(Protocol):
    """All ranks of a model, seen as one."""

    def load(self) -> ModelInfo:
        """Load the model and make the KV pool."""

    def prepare_adapter(self, checkpoint: AdapterCheckpoint) -> None:
        """Make the adapter's weights ready for a later step's `add_adapters`.

        Called from the thread that prepares adapters, while steps run.
        """

    def submit(self, step: SchedulerOutput) -> None:
        """Take on a step; `requests` may be empty. At most two are taken on and not collected.

        Steps run one after the other, in this order, whenever that is; all of a step's parts after
        all parts of the step before.
        """

    def collect(self) -> ModelRunnerOutput:
        """Wait for the oldest step that was not collected yet; returns what came out of it."""

    def close(self) -> None:
        """End what it has started; no step is submitted after."""


def make_executor(
    config: EngineConfig,
    on_lost: Callable[[RankLostError], None] = lambda error: None,
    on_late: Callable[[Sequence[int]], None] = lambda ranks: None,
) -> Executor:
    """Make a worker in this process, and further ranks in others if the model is divided.

    on_lost, on_late: as of `start_ranks`; told of no worker that is alone.
    """
    # torch is only imported where it computes
    if config.parallel.tensor_parallel_size > 1:
        from lora_serve.worker.rank_start import start_ranks

        return start_ranks(config, on_lost, on_late)
    from lora_serve.worker.worker import Worker

    return Worker.of(config)
