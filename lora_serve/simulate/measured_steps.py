"""The calibration of a real engine in this process: batches of many shapes, each step timed.

A step's time is a turn of the engine's loop: it begins when the turn before has ended, or when the
engine was given its first requests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from queue import Empty, SimpleQueue
from random import Random
from statistics import median

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.bench.workload import FIRST_TOKEN_ID
from lora_serve.config import EngineConfig
from lora_serve.engine import wire
from lora_serve.engine.core.build import build_engine_core
from lora_serve.engine.core.executor import Executor
from lora_serve.errors import ConfigError
from lora_serve.generate_request import GenerateRequest
from lora_serve.identity import BASE_MODEL, NoAdapter
from lora_serve.messages import CallReply, EngineRequest, LoadAdapter, UnloadAdapter
from lora_serve.model_info import ModelInfo
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams
from lora_serve.simulate.features import step_features
from lora_serve.simulate.fit import StepSample
from lora_serve.step import ModelRunnerOutput, SchedulerOutput

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
PROMPT_TOKENS = (24, 100, 300, 1000, 3000)
OUTPUT_TOKENS = 10
FIRST_LATE_TURN, NUM_LATE_TURNS = 4, 5  # when the others decode
NUM_WARM_UPS = 2
STRIDE = 7  # how often the shapes are gone through: if time runs out, all sizes have been seen
MAX_SHARE = 0.15  # of the time, for one batch
NUM_LOADS = 4  # at a time, as many as a loader reads at a time
LOAD_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that come at once. num_adapters: different ones among them; 0 asks the base model.

    num_late: how many of them come when the others decode, a few a step. is_cold: adapters take
    turns, so that, where not all of them have room in memory, each is read anew.
    """

    num_requests: int
    prompt_tokens: int
    num_adapters: int = 0
    num_late: int = 0
    is_cold: bool = False

    @property
    def num_tokens(self) -> int:
        return self.num_requests * self.prompt_tokens

    def __str__(self) -> str:
        return (
            f"{self.num_requests} x {self.prompt_tokens} tokens, {self.num_adapters} adapters, "
            f"{self.num_late} late{', cold' * self.is_cold}"
        )


class TimedExecutor:
    """Passes everything on to an executor, and keeps the steps that were collected."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._submitted: list[SchedulerOutput] = []
        self.collected: list[SchedulerOutput] = []

    def load(self) -> ModelInfo:
        return self._executor.load()

    def prepare_adapter(self, checkpoint: AdapterCheckpoint) -> None:
        self._executor.prepare_adapter(checkpoint)

    def submit(self, step: SchedulerOutput) -> None:
        self._submitted.append(step)
        self._executor.submit(step)

    def collect(self) -> ModelRunnerOutput:
        output = self._executor.collect()
        self.collected.append(self._submitted.pop(0))
        return output

    def close(self) -> None:
        """Do nothing: nothing was started."""


class Calibration:
    """An engine of its own, and the steps that it has been timed at."""

    def __init__(self, config: EngineConfig, executor: Executor) -> None:
        self._notified: SimpleQueue[None] = SimpleQueue()
        self._executor = TimedExecutor(executor)
        self.model = self._executor.load()
        self._core = build_engine_core(
            config, self._executor, self.model, lambda: self._notified.put(None)
        )
        self._config = config
        self._encoder = wire.encoder()
        self._random = Random(0)
        self._num_requests = self._num_calls = 0
        self._turns = count()
        self._adapters: list[str] = []
        self.samples: list[StepSample] = []
        self.busy_cores = 1.0  # while steps were timed

    def close(self) -> None:
        self._core.close()

    def load_adapters(self, paths: Sequence[str]) -> tuple[float, float]:
        """Load adapters, and time it: seconds of reading one, and of preparing one behind that.

        Reads happen beside each other and preparations one after the other, so what NUM_LOADS
        loads at once take longer than one load is the preparations.
        """
        alone = [self._load([path]) for path in paths]
        most = list(paths[:NUM_LOADS])
        together = [self._load(most) for _ in range(3)] if len(most) > 1 else alone
        one = median(alone)
        prepare = max(0.0, median(together) - one) / max(1, len(most) - 1)
        self._load(paths)
        return max(0.0, one - prepare), min(one, prepare)

    def measure(
        self, seconds: float, progress: Callable[[str], None] = lambda line: None
    ) -> list[StepSample]:
        """Time batches of many shapes, for about so many seconds.

        One that would take more than its share of the time is left out, so that many are seen.
        """
        batches = list(self._batches())
        for batch in batches[:NUM_WARM_UPS]:
            self.run(batch)
        begin, cpu_begin = time.perf_counter(), time.process_time()
        self.samples.clear()
        taken: dict[Batch, float] = {}
        num_tokens = 0
        while True:
            has_run = False
            for batch in batches:
                spent = time.perf_counter() - begin
                # A batch that was not run yet takes about as long a token as those before it.
                likely = taken.get(batch, spent * batch.num_tokens / max(1, num_tokens))
                if spent + likely < seconds and likely < seconds * MAX_SHARE:
                    self.run(batch)
                    taken[batch] = time.perf_counter() - begin - spent
                    num_tokens += batch.num_tokens
                    progress(f"{batch}: {taken[batch]:.2f} s")
                    has_run = True
            if not has_run:
                spent = time.perf_counter() - begin
                self.busy_cores = max(1.0, (time.process_time() - cpu_begin) / spent)
                return self.samples

    def run(self, batch: Batch) -> None:
        """Answer one batch, and time its steps."""
        indices = iter(range(batch.num_requests))
        for index in islice(indices, batch.num_requests - batch.num_late):
            self._add(batch, index)
        last = time.perf_counter()
        num_turns = 0
        while self._core.has_requests:
            num_turns += 1
            if num_turns >= FIRST_LATE_TURN:
                for index in islice(indices, math.ceil(batch.num_late / NUM_LATE_TURNS)):
                    self._add(batch, index)
            last = self._turn(str(batch), last)

    # ── parts ───────────────────────────────────────────────────────────────────────────────

    def _batches(self) -> Iterator[Batch]:
        """The shapes that fit the engine, from small to large several times."""
        scheduler, cache = self._config.scheduler, self._config.cache
        longest = self._core.ready().max_request_tokens
        room = self.model.num_blocks * cache.block_size
        most_adapters = min(len(self._adapters), self._config.lora.max_loras)
        found: list[Batch] = []
        for num_requests in BATCHES:
            for prompt_tokens in PROMPT_TOKENS:
                num_tokens = prompt_tokens + OUTPUT_TOKENS + cache.block_size
                is_too_many = num_requests > scheduler.max_num_seqs
                if is_too_many or num_tokens > longest or num_requests * num_tokens > room:
                    continue
                numbers = {0, min(1, most_adapters), min(num_requests, most_adapters)}
                found += [Batch(num_requests, prompt_tokens, each) for each in sorted(numbers)]
                if num_requests > 1:
                    found.append(Batch(num_requests, prompt_tokens, 0, num_requests // 2))
        if not found:
            raise ConfigError(
                f"requests of {longest} tokens are the longest that this engine takes, which are "
                "too few to measure; give it more KV or a larger --max-model-len"
            )
        if most_adapters:
            found.append(Batch(1, found[0].prompt_tokens, 1, is_cold=True))
        by_size = sorted(found, key=lambda batch: batch.num_tokens)
        return (batch for first in range(STRIDE) for batch in by_size[first::STRIDE])

    def _turn(self, group: str, last: float) -> float:
        """Step once, as the engine process does; returns when the turn has ended."""
        self._core.step()
        for reply in self._core.take_replies():
            self._encoder.encode(reply)
        now = time.perf_counter()
        for step in self._executor.collected:
            if step.requests:
                features = step_features(step)
                alike = f"{group}, {features.new_adapters:g} new"
                if features.kind == "mixed":
                    alike += f", {features.prefill_tokens:g} beside {features.decode_tokens:g}"
                self.samples.append(StepSample(alike, features, now - last))
        self._executor.collected.clear()
        return now

    def _add(self, batch: Batch, index: int) -> None:
        self._num_requests += 1
        vocab = range(FIRST_TOKEN_ID, self.model.vocab_size)
        prompt = tuple(self._random.choice(vocab) for _ in range(batch.prompt_tokens))
        adapter: str | NoAdapter = BASE_MODEL
        if batch.num_adapters:
            number = next(self._turns) if batch.is_cold else index % batch.num_adapters
            adapter = self._adapters[number % len(self._adapters)]
        params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0, seed=0, ignore_eos=True)
        request = GenerateRequest(
            request_id=str(self._num_requests),
            prompt=TokensPrompt(prompt),
            params=params,
            lora_name=adapter,
        )
        self._core.handle(EngineRequest(request))

    def _load(self, paths: Sequence[str]) -> float:
        """Load adapters at once under names of their own; how long that took."""
        for name in self._adapters:
            self._num_calls += 1
            self._core.handle(UnloadAdapter(self._num_calls, name))
        self._core.step()
        self._core.take_replies()
        self._adapters = [f"calibration-{number}" for number in range(len(paths))]
        begin = time.perf_counter()
        for name, path in zip(self._adapters, paths, strict=True):
            self._num_calls += 1
            self._core.handle(LoadAdapter(self._num_calls, name, path))
        num_ended = 0
        while num_ended < len(paths):
            self._core.step()
            for reply in self._core.take_replies():
                if isinstance(reply, CallReply):
                    _require_success(reply)
                    num_ended += 1
            if num_ended < len(paths):
                self._wait()
        return time.perf_counter() - begin

    def _wait(self) -> None:
        try:
            self._notified.get(timeout=LOAD_SECONDS)
        except Empty:
            raise ConfigError(f"an adapter was not loaded within {LOAD_SECONDS:g} s") from None


def _require_success(reply: CallReply) -> None:
    if reply.error is not None:
        raise ConfigError(f"an adapter cannot be loaded for the calibration: {reply.error.message}")
