"""A whole engine over random weights in this process, with a stopwatch between its parts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from benchmarks.speed.overhead.stopwatch import Stopwatch, Timed
from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.config import EngineConfig, SchedulerConfig
from lora_serve.engine.core.build import build_engine_core
from lora_serve.engine.core.core import EngineCore
from lora_serve.generate_request import GenerateRequest
from lora_serve.layers.rotary import RopeSpec
from lora_serve.messages import EngineRequest
from lora_serve.model_info import ModelInfo
from lora_serve.models.dense import DenseSpec
from lora_serve.models.weights import RandomWeights, WeightReader
from lora_serve.ops._cpu import usable_paths
from lora_serve.ops.cpu.backend import CpuKernels
from lora_serve.ops.cpu.threads import pin_threads
from lora_serve.ops.recorded_steps import Record, RecordedWork
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling.lm_head_screening import LMHeadScreening, with_screening
from lora_serve.sampling.select import select_sampler
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import ModelRunnerOutput, SchedulerOutput
from lora_serve.worker.adapter_weights import AdapterWeights
from lora_serve.worker.batch_builder import BatchBuilder
from lora_serve.worker.device import CpuDevice
from lora_serve.worker.kv_cache import allocate_kv_caches
from lora_serve.worker.model_runner import ModelRunner, SubmittedBatch
from lora_serve.worker.step_graphs import StepRecorder, exact_sizes

Parts = dict[str, float]

PROMPT_TOKENS = 128
WARM_UP_STEPS = 5
BLOCK_SIZE = 16
DTYPE = torch.bfloat16
KERNELS = (
    *("linear", "gated_linear", "lora", "norm", "silu_and_mul", "rotary_and_write_kv"),
    *("attention", "screened_tokens"),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model decides how long its steps take."""

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int

    def spec(self, max_positions: int) -> DenseSpec:
        return DenseSpec(
            architecture="Qwen2ForCausalLM",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=64,
            rms_norm_eps=1e-6,
            rope=RopeSpec(),
            max_positions=max_positions,
            qkv_bias=True,
            output_bias=False,
            qk_norm=False,
            tie_word_embeddings=True,
            windows=(None,) * self.num_layers,
            dtype="bfloat16",
        )


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("4 layers, 256 wide", 4096, 256, 1024, 4, 4, 2),
        Shape("Qwen2.5-0.5B", 151_936, 896, 4864, 24, 14, 2),
    )
}


@dataclass(frozen=True, slots=True)
class Threads:
    """The kernels' pool of threads. are_pinned: as --pin-cpu-threads does it."""

    count: int
    are_pinned: bool = True

    def kernels(self) -> Any:
        kernels = CpuKernels(usable_paths()[0], self.count)
        if self.are_pinned:
            pin_threads(kernels.native.thread_ids())
        return kernels


class TimedExecutor:
    """Does what `Worker` does, of the same parts, with a stopwatch before each of them.

    part_of_kernel: under which name each of the kernels is timed.
    """

    def __init__(
        self,
        shape: Shape,
        threads: Threads,
        max_num_seqs: int,
        num_blocks: int,
        watch: Stopwatch,
        part_of_kernel: Mapping[str, str],
    ) -> None:
        spec = shape.spec(num_blocks * BLOCK_SIZE)
        kernels = threads.kernels()
        kernels.native = Timed(kernels.native, watch, part_of_kernel)
        ops = with_screening(kernels.ops(), "auto")
        sampler: Any = select_sampler(ops)
        device: Any = CpuDevice()
        weights = WeightReader(RandomWeights(spec.tensor_shapes(), 0, DTYPE), DTYPE)
        model: Any = spec.build(weights, ops, spec.rotary_tables(spec.max_positions))
        argmax = model.screened_argmax
        screening: Any = None if argmax is None else LMHeadScreening(argmax)
        group_of = [0] * len(spec.kv_specs())
        builder: Any = BatchBuilder(ops, device, BLOCK_SIZE, spec.hidden_size, DTYPE, group_of)
        kv_caches = allocate_kv_caches(spec.kv_specs(), ops, num_blocks, BLOCK_SIZE, DTYPE)
        graphs: Any = StepRecorder(
            device,
            ops.graph_plans,
            partial(model.forward, kv_caches=kv_caches),
            exact_sizes(max_num_seqs, max_num_seqs),
            record=_timed_replays(ops.record, watch),
            max_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            group_of=group_of,
            with_lora=False,
        ).record()
        self._runner = ModelRunner(
            device,
            Timed(model, watch, {"forward": "forward", "logits": "forward"}),  # type: ignore
            Timed(sampler, watch, {"sample": "sample"}),  # type: ignore
            Timed(screening, watch, {"sample": "forward"}) if screening else None,  # type: ignore
            kv_caches,
            Timed(builder, watch, {"lay_out": "batch", "to_device": "batch"}),  # type: ignore
            AdapterWeights(spec.linears(), ops, device, DTYPE),
            Timed(graphs, watch, {"run": "forward"}),  # type: ignore
        )
        self._submitted: deque[tuple[int, SubmittedBatch]] = deque()
        self._info = ModelInfo(
            fingerprint=b"",
            dtype="bfloat16",
            vocab_size=spec.vocab_size,
            hidden_size=spec.hidden_size,
            max_model_len=spec.max_positions,
            num_blocks=num_blocks,
            kernels=ops.numerics,
        )

    def load(self) -> ModelInfo:
        return self._info

    def prepare_adapter(self, checkpoint: AdapterCheckpoint) -> None:
        raise NotImplementedError(f"no adapter is measured here, not {checkpoint.path} either")

    @torch.inference_mode()
    def submit(self, step: SchedulerOutput) -> None:
        self._submitted.append((step.step_id, self._runner.submit(step.requests)))

    def collect(self) -> ModelRunnerOutput:
        step_id, batch = self._submitted.popleft()
        return ModelRunnerOutput(step_id, batch.results())

    def close(self) -> None:
        """Do nothing: nothing was started."""


def _timed_replays(record: Record | None, watch: Stopwatch) -> Record:
    """The kernels of a recorded step run when it is replayed."""
    assert record is not None, "the native kernels record their own calls"

    def timed(run: Callable[[], Tensor]) -> RecordedWork:
        work: Any = Timed(record(run), watch, {"replay": "kernels"})
        return work

    return timed


def decode_steps(shape: Shape, threads: Threads, num_requests: int, num_steps: int) -> list[Parts]:
    """Seconds by part of steps in which all requests decode, PROMPT_TOKENS and a few behind each.

    The whole step is the part "step": from taking in what the engine decides to the bytes that
    would be sent to the API process.
    """
    watch = Stopwatch()
    num_tokens = PROMPT_TOKENS + num_steps + WARM_UP_STEPS + 1
    num_blocks = num_requests * -(-num_tokens // BLOCK_SIZE)
    together = dict.fromkeys(KERNELS, "kernels")
    executor: Any = TimedExecutor(shape, threads, num_requests, num_blocks, watch, together)
    core = _build_core(executor, watch)
    for index in range(num_requests):
        request = _request(index, PROMPT_TOKENS, num_tokens - PROMPT_TOKENS, shape.vocab_size)
        core.handle(request)
    encode = msgspec.msgpack.Encoder().encode

    def step() -> None:
        core.step()
        watch.timed("reply", lambda: [encode(reply) for reply in core.take_replies()])()

    while core.scheduler.totals.num_generated_tokens < num_requests * WARM_UP_STEPS:
        step()
    steps = []
    for _ in range(num_steps):
        watch.take()
        watch.timed("step", step)()
        steps.append(watch.take())
    core.close()
    return steps


def prefill_steps(shape: Shape, threads: Threads, num_tokens: int, num_steps: int) -> list[Parts]:
    """Seconds by part, each kernel a part of its own, of steps that compute one prompt each."""
    watch = Stopwatch()
    num_blocks = (num_steps + 1) * -(-(num_tokens + 1) // BLOCK_SIZE)
    each = {kernel: kernel for kernel in KERNELS}
    executor: Any = TimedExecutor(shape, threads, 1, num_blocks, watch, each)
    core = _build_core(executor, watch)
    steps = []
    for index in range(num_steps + 1):
        request = _request(index, num_tokens, 1, shape.vocab_size)
        core.handle(request)
        watch.take()
        watch.timed("step", core.step)()
        steps.append(watch.take())
        core.take_replies()
    core.close()
    return steps[1:]  # the first one finds no memory at hand


def _build_core(executor: Any, watch: Stopwatch) -> EngineCore:
    config = EngineConfig(scheduler=SchedulerConfig(max_num_batched_tokens=8192))
    core = build_engine_core(config, executor, executor.load(), notify=lambda: None)
    scheduler: Any = core.scheduler
    parts = {"schedule": "schedule", "update_from_output": "update"}
    core.scheduler = Timed(scheduler, watch, parts)  # type: ignore[assignment]
    return core


def _request(index: int, num_tokens: int, max_tokens: int, vocab_size: int) -> EngineRequest:
    """A prompt of its own, so that nothing is found in the cache."""
    prompt = TokensPrompt(tuple((index * 7919 + 31 * i) % vocab_size for i in range(num_tokens)))
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, seed=0, ignore_eos=True)
    request = GenerateRequest(request_id=f"request-{index}", prompt=prompt, params=params)
    return EngineRequest(request)
