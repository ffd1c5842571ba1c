"""A card that is none: the engine does all that it does for one, and nothing is computed.

Launches are made as values and dropped, recorded steps replay nothing, and copies are the host's
own. All tokens are 0.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

from torch import Tensor

from lora_serve.config import EngineConfig
from lora_serve.model_info import ModelInfo
from lora_serve.ops.contract import Ops
from lora_serve.ops.recorded_steps import RecordedWork
from lora_serve.ops.triton.backend import TritonKernels
from lora_serve.ops.triton.launch import H200, Launch
from lora_serve.worker import loaded_model
from lora_serve.worker.device import CpuDevice
from lora_serve.worker.worker import Worker


class NoDevice(CpuDevice):
    """The contract is kept by doing everything at once, on the host's memory."""

    name = "no device"
    is_asynchronous = True

    def upload(self, host: Tensor) -> Tensor:
        return host.clone()

    def free_bytes(self) -> int:
        return 0  # the number of KV blocks is given

    def record(self, run: Callable[[], Tensor]) -> RecordedWork:
        return NoWork(run())


class NoWork:
    def __init__(self, output: Tensor) -> None:
        self.output = output

    def replay(self) -> None:
        return None


def idle_ops() -> Ops:
    """The Triton kernels as they are launched for an H200, with every launch dropped."""
    return TritonKernels(NoDevice.torch_device, H200, batch_invariant=True, run=_drop).ops()


def _drop(launch: Launch) -> None:
    """Enqueue nothing; give tokens of the vocabulary in place of those that it would draw."""
    tokens = launch.arguments.get("tokens_ptr")
    if isinstance(tokens, Tensor):
        tokens.zero_()


class IdleWorker(Worker):
    """A worker on no device, with the kernels for a card."""

    def load(self) -> ModelInfo:
        with mock.patch.object(loaded_model, "choose_ops", return_value=idle_ops()):
            return super().load()


def make_idle_worker(config: EngineConfig) -> IdleWorker:
    return IdleWorker(
        config.model,
        config.cache,
        config.lora,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        device=NoDevice(),
    )
