"""Whole engine steps: scheduler, worker, sampling and replies, in this very process."""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from benchmarks.common.make_checkpoint import ModelShape
from lora_serve.adapter_checkpoint import AdapterCheckpoint, LoRAModule, RawTensor
from lora_serve.adapters.loader import AdapterLoader
from lora_serve.adapters.location import AdapterCopy, HubAdapter
from lora_serve.adapters.manager import AdapterManager
from lora_serve.adapters.source import AdapterSource
from lora_serve.adapters.threads import AdapterThreads
from lora_serve.config import (
    CacheConfig,
    EngineConfig,
    LoRAConfig,
    ModelConfig,
    SchedulerConfig,
)
from lora_serve.engine.core.core import EngineCore
from lora_serve.engine.core.executor import Executor, make_executor
from lora_serve.engine.core.grammars import make_grammar_service
from lora_serve.engine.core.kv_tiers import StaleVersions, make_connector
from lora_serve.generate_request import GenerateRequest
from lora_serve.identity import BASE_MODEL, BlockHasher, NoAdapter
from lora_serve.kv.manager import KVCacheManager
from lora_serve.messages import AbortRequests, EngineRequest, LoadAdapter
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams

RANK = 16
WARM_UP_STEPS = 4
PROFILED_STEPS = 8  # to read what was profiled takes longer than the steps
PREFILL_TURNS = 3  # in the first, libraries load what such a product takes
LONE_REQUESTS = 16
GREEDY = SamplingParams(temperature=0.0, seed=0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Settings:
    """What an engine is made for.

    num_blocks: of KV; by what memory is left if None. async_scheduling: the device's way if None.
    """

    device: str
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_adapters: int
    batch_invariant: bool = False
    num_blocks: int | None = None
    async_scheduling: bool | None = None
    overlap_launches: bool = True


@dataclass(frozen=True, slots=True)
class DecodeTiming:
    """idle_share: of the time, the part in which the card had no work; None if not measured."""

    num_requests: int
    num_adapters: int
    step_ms: float
    tokens_per_second: float
    idle_share: float | None


@dataclass(frozen=True, slots=True)
class FirstTokenTiming:
    """How long lone requests took to their first tokens, when each asked for the next adapter."""

    num_adapters: int
    median_ms: float
    worst_ms: float


class MeasuredEngine:
    """An engine over random weights, which adapters made of random numbers can be loaded into."""

    def __init__(
        self,
        directory: Path,
        shape: ModelShape,
        settings: Settings,
        make_executor: Callable[[EngineConfig], Executor] = make_executor,
    ) -> None:
        config = engine_config(directory, settings)
        self._settings = settings
        self._shape = shape
        self._executor = make_executor(config)
        begun = time.perf_counter()
        self.info = self._executor.load()
        self.load_seconds = time.perf_counter() - begun
        self._random = _random_bytes(shape)
        source = AdapterSource(self._checkpoint, _download_nothing, _read_no_copy)
        prepare = self._executor.prepare_adapter
        loader = AdapterLoader(config.lora, source, prepare, _ignore_notice, AdapterThreads())
        hasher = BlockHasher()
        self._core = EngineCore(
            config,
            self._executor,
            self.info,
            AdapterManager(config.lora, loader),
            KVCacheManager(self.info.num_blocks, config.cache.block_size, False),
            hasher,
            make_connector(config.kv_tiers, self.info, hasher, _ignore_notice),
            StaleVersions(0.0),
            make_grammar_service(config, self.info),
        )
        self._encode = msgspec.msgpack.Encoder().encode
        self._num_requests = 0
        self._num_adapters = 0

    def close(self) -> None:
        self._core.close()

    def load_adapters(self, count: int) -> None:
        """Have `count` adapters, named "0", "1", …, on the device."""
        while self._num_adapters < count:
            name = str(self._num_adapters)
            self._core.handle(LoadAdapter(self._num_adapters, name, name))
            self._num_adapters += 1
        while self._core.awaits_threads:
            self.step()
            time.sleep(1e-3)  # a loop that never waits keeps Python from the thread that loads

    def decode(
        self, num_requests: int, num_adapters: int, prompt_len: int, num_steps: int
    ) -> DecodeTiming:
        """Steps as of `decoding`."""
        with self.decoding(num_requests, num_adapters, prompt_len, num_steps):
            times = [self.step() for _ in range(num_steps)]
            idle_share = self._idle_share(min(num_steps, PROFILED_STEPS))
        seconds = statistics.median(times)
        return DecodeTiming(
            num_requests, num_adapters, 1e3 * seconds, num_requests / seconds, idle_share
        )

    @contextmanager
    def decoding(
        self,
        num_requests: int,
        num_adapters: int,
        prompt_len: int,
        num_steps: int,
        sampling: SamplingParams = GREEDY,
    ) -> Iterator[None]:
        """While so many steps have a token of each request, adapters dealt out in turn."""
        self.load_adapters(num_adapters)
        names = _dealt_out(num_adapters, num_requests)
        with self._running(names, prompt_len, 4 * num_steps + 64, sampling):
            for _ in range(WARM_UP_STEPS):
                self.step()
            yield

    def step(self) -> float:
        """Seconds that one step took, to the bytes that the API process would be sent."""
        begun = time.perf_counter()
        self._core.step()
        for reply in self._core.take_replies():
            self._encode(reply)
        return time.perf_counter() - begun

    @property
    def num_generated_tokens(self) -> int:
        return self._core.scheduler.totals.num_generated_tokens

    def prefill_tokens_per_second(self, prompt_len: int, num_prompts: int) -> float:
        """Takes prompts that arrive together, until the last has its first token: the best turn."""
        names = _dealt_out(0, num_prompts)
        seconds = [self._seconds_to_first_tokens(names, prompt_len) for _ in range(PREFILL_TURNS)]
        return num_prompts * prompt_len / min(seconds)

    def first_token(self, num_adapters: int, prompt_len: int) -> FirstTokenTiming:
        """Times requests that are alone, one after the other."""
        self.load_adapters(num_adapters)
        self._seconds_to_first_tokens(["0"], prompt_len)
        times = [
            1e3 * self._seconds_to_first_tokens([str(turn % num_adapters)], prompt_len)
            for turn in range(max(LONE_REQUESTS, num_adapters))
        ]
        return FirstTokenTiming(num_adapters, statistics.median(times), max(times))

    def answered_tokens_per_second(
        self, num_requests: int, num_adapters: int, prompt_len: int, num_tokens: int
    ) -> float:
        """Takes requests that arrive together, and counts the time for their prompts as well."""
        self.load_adapters(num_adapters)
        names = _dealt_out(num_adapters, num_requests)
        self._answer(names, prompt_len, 2)
        return num_requests * num_tokens / self._answer(names, prompt_len, num_tokens)

    def _answer(self, names: list[str | NoAdapter], prompt_len: int, num_tokens: int) -> float:
        """Seconds until the last answer has ended."""
        begun = time.perf_counter()
        for name in names:
            self._add(name, prompt_len, num_tokens)
        while self._core.has_requests:
            self.step()
        seconds = time.perf_counter() - begun
        self._finish()
        return seconds

    def _seconds_to_first_tokens(self, names: list[str | NoAdapter], prompt_len: int) -> float:
        begun = time.perf_counter()
        with self._running(names, prompt_len, max_tokens=4):
            return time.perf_counter() - begun

    @contextmanager
    def _running(
        self,
        names: list[str | NoAdapter],
        prompt_len: int,
        max_tokens: int,
        sampling: SamplingParams = GREEDY,
    ) -> Iterator[None]:
        """While all these requests are beyond their prompts."""
        ids = [self._add(name, prompt_len, max_tokens, sampling) for name in names]
        while any(self._core.scheduler.get(i).num_output_tokens == 0 for i in ids):  # type: ignore[union-attr]
            self.step()
        yield
        self._core.handle(AbortRequests(tuple(ids)))
        self._finish()

    def _finish(self) -> None:
        """Finish what is under way, so that it is not in the time of what follows."""
        while self._core.step():
            pass
        self._core.take_replies()

    def _add(
        self,
        lora_name: str | NoAdapter,
        prompt_len: int,
        max_tokens: int,
        sampling: SamplingParams = GREEDY,
    ) -> str:
        self._num_requests += 1
        request_id = str(self._num_requests)
        first = 7 * self._num_requests
        token_ids = tuple((first + i) % self._shape.vocab_size for i in range(prompt_len))
        request = GenerateRequest(
            request_id=request_id,
            prompt=TokensPrompt(token_ids),
            params=msgspec.structs.replace(sampling, max_tokens=max_tokens),
            lora_name=lora_name,
        )
        self._core.handle(EngineRequest(request))
        return request_id

    def _idle_share(self, num_steps: int) -> float | None:
        """None where nothing counts what the device does."""
        if self._settings.device != "cuda":
            return None
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            seconds = sum(self.step() for _ in range(num_steps))
        busy = covered(
            (event.time_range.start, event.time_range.end)
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        )
        return 1.0 - busy / 1e6 / seconds if busy else None

    def _checkpoint(self, path: str) -> AdapterCheckpoint:
        """Adapter number `path`: on all projections; all are of the same numbers."""
        modules = tuple(
            LoRAModule(name, RANK, 1.0, self._raw(RANK, inputs), self._raw(outputs, RANK))
            for name, (outputs, inputs) in self.info.lora_modules.items()
        )
        num_bytes = sum(len(module.a.data) + len(module.b.data) for module in modules)
        digest = hashlib.sha256(path.encode()).digest()
        return AdapterCheckpoint(path, digest, RANK, num_bytes, "", modules)

    def _raw(self, *shape: int) -> RawTensor:
        return RawTensor("BF16", shape, self._random[: 2 * shape[0] * shape[1]])


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much time lies in any of them: kernels may begin while others end."""
    total, end = 0.0, -math.inf
    for begin, span_end in sorted(spans):
        total += max(0.0, span_end - max(begin, end))
        end = max(end, span_end)
    return total


def _dealt_out(num_adapters: int, num_requests: int) -> list[str | NoAdapter]:
    """The adapter of each request, in turn; the base model's if there are none."""
    if num_adapters == 0:
        return [BASE_MODEL] * num_requests
    return [str(index % num_adapters) for index in range(num_requests)]


def _download_nothing(adapter: HubAdapter) -> str:
    raise AssertionError(f"{adapter} is on no hub")


def _read_no_copy(copy: AdapterCopy) -> AdapterCheckpoint:
    raise AssertionError(f"{copy.origin} was never downloaded")


def _ignore_notice() -> None:
    """No thread sleeps here: steps follow each other until all is done."""


def _random_bytes(shape: ModelShape) -> memoryview:
    """Values to draw from, as many as the largest tensor of an adapter has."""
    widest = max(max(sizes) for sizes in shape.projections.values())
    values = (0.05 * torch.randn(RANK * widest)).bfloat16()
    return memoryview(values.view(torch.uint8).numpy().tobytes())


def engine_config(directory: Path, settings: Settings) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(
            model=str(directory),
            load_format="dummy",
            dtype="bfloat16",
            device=settings.device,
            batch_invariant=settings.batch_invariant,
            overlap_launches=settings.overlap_launches,
            max_model_len=settings.max_model_len,
        ),
        cache=CacheConfig(enable_prefix_caching=False, num_gpu_blocks_override=settings.num_blocks),
        scheduler=SchedulerConfig(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            async_scheduling=settings.async_scheduling,
        ),
        lora=LoRAConfig(
            enable_lora=settings.max_adapters > 0,
            max_loras=max(1, settings.max_adapters),
            max_cpu_loras=max(1, settings.max_adapters),
            max_lora_rank=RANK,
        ),
    )
