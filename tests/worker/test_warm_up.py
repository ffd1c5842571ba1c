"""Before it serves, a worker on a card has compiled every kernel that any step may need.

Here the kernels are asked for as on an H200 and none runs; what the compiler would see is known.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lora_serve.config import CacheConfig, LoRAConfig, ModelConfig
from lora_serve.distributed.group import ALONE, Group, own_columns
from lora_serve.distributed.shares import place_of
from lora_serve.identity import BASE_MODEL, AdapterRef, NoAdapter
from lora_serve.models.source import load_spec
from lora_serve.ops.contract import Ops
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import SampleInput, ScheduledRequest, SchedulerOutput
from lora_serve.worker import kv_sizing, loaded_model
from lora_serve.worker.largest_steps import StepLimits, largest_steps
from lora_serve.worker.rank_shares import adapter_share
from lora_serve.worker.worker import Worker
from tests.fakes.asked import scoring
from tests.fakes.device import CountingDevice
from tests.fakes.peft_adapters import make_peft, read_saved
from tests.fakes.served_model import save_served_model
from tests.fakes.tiny_models import VOCAB_SIZE

pytest.importorskip("triton", reason="Triton is not installed")

from lora_serve.ops.triton import codes, lora
from lora_serve.ops.triton.backend import TritonKernels
from lora_serve.ops.triton.launch import H200, Launch

BLOCK_SIZE = 16
MAX_MODEL_LEN = 1024
MAX_LOGPROBS = 9
RANKS = (1, 4, 13, 64)


class MiddleRank:
    """One of three ranks, for which the others give what it gives itself."""

    rank, world_size = 1, 3

    def gather(
        self, part: Tensor, widths: Sequence[int], whole: Tensor, *, while_loading: bool = False
    ) -> None:
        for columns in whole.split(list(widths), dim=1):
            columns.zero_()
            width = min(columns.shape[1], part.shape[1])
            columns[:, :width] = part[:, :width]

    def all_to_all(self, rows: Tensor, shares: Sequence[range], parts: Tensor) -> None:
        parts.copy_(own_columns(rows, shares[self.rank]).expand_as(parts))

    def common_rows(self, *_: object) -> None:
        return None

    def close(self) -> None: ...


class WatchedWorker:
    """compiled: what its launches so far were variants of."""

    def __init__(self, model: Path, group: Group = ALONE, **settings: Any) -> None:
        self.compiled: set[tuple[object, ...]] = set()
        self.largest: list[StepLimits] = []
        self.steps = 0
        self.worker = Worker(
            ModelConfig(
                model=str(model),
                dtype="bfloat16",
                cpu_threads=1,
                max_logprobs=MAX_LOGPROBS,
                logprobs_mode="processed_logprobs",
                **settings,
            ),
            CacheConfig(num_gpu_blocks_override=512),
            LoRAConfig(enable_lora=True, max_loras=8, max_lora_rank=64),
            max_num_seqs=96,
            max_num_batched_tokens=1024,
            device=CountingDevice(2**40, 0, peaks=[0] * 4),
            group=group,
        )
        with (
            mock.patch.object(loaded_model, "choose_ops", self._choose_ops),
            mock.patch.object(kv_sizing, "largest_steps", self._largest_steps),
        ):
            self.worker.load()
        spec, place = load_spec(model), place_of(group)
        linears, vocabulary = self.worker.linears, self.worker.vocabulary
        self.adapters: list[AdapterRef | NoAdapter] = [BASE_MODEL]
        for rank in RANKS:
            directory = model.parent / f"rank-{rank}"
            checkpoint = read_saved(make_peft("qwen2", rank, r=rank), directory, spec)
            share = adapter_share(checkpoint, linears, vocabulary, place)
            self.worker.prepare_adapter(share)
            self.run((), add=(checkpoint.digest,))
            self.adapters.append(AdapterRef("a", checkpoint.digest))

    def run(self, requests: Sequence[ScheduledRequest], add: tuple[bytes, ...] = ()) -> None:
        self.worker.submit(SchedulerOutput(self.steps, tuple(requests), add_adapters=add))
        self.worker.collect()
        self.steps += 1

    def _largest_steps(
        self, limits: StepLimits, adapter: AdapterRef | NoAdapter
    ) -> list[tuple[ScheduledRequest, ...]]:
        self.largest.append(limits)
        return largest_steps(limits, adapter)

    def _choose_ops(
        self, overrides: object, device: torch.device, invariant: bool, *_: bool
    ) -> Ops:
        return TritonKernels(device, H200, batch_invariant=invariant, run=self._note).ops()

    def _note(self, launch: Launch) -> None:
        if 0 not in launch.grid:
            self.compiled.add(launch.variant)
            tokens = launch.arguments.get("tokens_ptr")
            if isinstance(tokens, torch.Tensor):
                tokens.zero_()  # as a kernel would write them, they are ids


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_served_model(tmp_path_factory.mktemp("served") / "model")


def any_step(
    adapters: Sequence[AdapterRef | NoAdapter], rng: random.Random
) -> list[ScheduledRequest]:
    """Prompts and decodes at any length, of some adapters; often more rows than are recorded."""
    left = rng.choice((1, 2, 30, 200, 600, 1024))
    adapters = rng.sample(adapters, rng.randrange(1, len(adapters) + 1))
    requests: list[ScheduledRequest] = []
    while left and len(requests) < 96 and rng.random() > 0.02:
        count = 1 if rng.random() < 0.5 else rng.randrange(1, left + 1)
        start = rng.randrange(MAX_MODEL_LEN - count + 1)
        requests.append(any_chunk(start, count, rng.choice(adapters), rng))
        left -= count
    return requests


def any_chunk(
    start: int, count: int, adapter: AdapterRef | NoAdapter, rng: random.Random
) -> ScheduledRequest:
    samples = rng.choice(((), (SampleInput(any_params(rng), 0, start + count),)))
    return ScheduledRequest(
        request_id="r",
        adapter=adapter,
        start=start,
        token_ids=[0] * count,
        block_tables=[[0] * -(-(start + count) // BLOCK_SIZE)],
        asked=scoring(rng.choice(((), [0] * count)), 0, *samples),
    )


def any_params(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        temperature=rng.choice((0.0, 0.7)),
        top_k=rng.choice((0, 1, 40)),
        top_p=rng.choice((1.0, 0.9)),
        min_p=rng.choice((0.0, 0.1)),
        logprobs=rng.choice((None, 2)),
        logit_bias=rng.choice(({}, {3: 1.0})),
    )


@pytest.mark.parametrize("group", [ALONE, MiddleRank()], ids=["alone", "rank"])
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_no_step_needs_a_kernel_that_is_not_compiled_when_serving_begins(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    enforce_eager: bool,
    batch_invariant: bool,
    group: Group,
) -> None:
    monkeypatch.setattr(lora, "MAX_TILES_APART", 40)  # so that prompts of 1,024 tokens are long,
    monkeypatch.setattr(lora, "IN_SPAN", 16)  # and the model's layers wide
    served = WatchedWorker(
        model, group, enforce_eager=enforce_eager, batch_invariant=batch_invariant
    )
    compiled = set(served.compiled)
    num_others = 12 if group is ALONE else 7  # the first rank alone draws
    assert len({variant[0] for variant in compiled}) == num_others + batch_invariant
    (limits,) = served.largest
    assert limits.max_logprobs == MAX_LOGPROBS
    assert (limits.vocab_size, limits.max_model_len) == (VOCAB_SIZE, MAX_MODEL_LEN)
    rng = random.Random(1)
    for _ in range(60):
        served.run(any_step(served.adapters, rng))
    for adapter in served.adapters:
        served.run([any_chunk(0, MAX_MODEL_LEN, adapter, rng)])
    assert served.compiled == compiled


def test_no_step_over_codes_needs_a_kernel_that_is_not_compiled(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step may have any number of rows: few rows alone need the kernel that folds spans apart."""
    monkeypatch.setattr(codes, "SPAN", 32)
    served = WatchedWorker(model, enforce_eager=True, quantization="int4")
    compiled = set(served.compiled)
    assert {"quantized_linear_kernel", "fold_kernel"} <= {variant[0] for variant in compiled}
    rng = random.Random(1)
    for _ in range(30):
        served.run(any_step(served.adapters, rng))
    assert served.compiled == compiled
