"""Rows whose token the step before drew, and that only the device knows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from lora_serve.config import CacheConfig, LoRAConfig, ModelConfig
from lora_serve.host_copies import HostArray
from lora_serve.identity import BASE_MODEL, AdapterRef, NoAdapter
from lora_serve.layers.batch import ForwardBatch
from lora_serve.models.source import load_spec
from lora_serve.ops.recorded_steps import RecordedWork
from lora_serve.ops.reference import REFERENCE
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import SampleInput, ScheduledRequest, SchedulerOutput
from lora_serve.worker.batch_builder import BatchBuilder
from lora_serve.worker.batch_rows import BatchRows, PendingTokens
from lora_serve.worker.step_graphs import GraphBuffers, StepGraph, StepKind
from lora_serve.worker.worker import Worker
from tests.fakes.asked import sampling
from tests.fakes.device import RecordingDevice
from tests.fakes.peft_adapters import make_peft, read_saved
from tests.fakes.seen_tokens import seen_tokens
from tests.fakes.served_model import save_served_model

GREEDY = SamplingParams(temperature=0, logprobs=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_served_model(tmp_path_factory.mktemp("served") / "model")


def make_worker(model: Path, backend: str) -> tuple[Worker, list[AdapterRef | NoAdapter]]:
    """A worker with one adapter."""
    worker = Worker(
        ModelConfig(
            model=str(model), dtype="float32", override_op=(f"all={backend}",), cpu_threads=1
        ),
        CacheConfig(num_gpu_blocks_override=32),
        LoRAConfig(enable_lora=True),
        max_num_seqs=4,
        max_num_batched_tokens=64,
    )
    worker.load()
    checkpoint = read_saved(make_peft("qwen2", 1), model.parent / "adapter", load_spec(model))
    worker.prepare_adapter(checkpoint)
    worker.submit(SchedulerOutput(0, (), add_adapters=(checkpoint.digest,)))
    worker.collect()
    return worker, [AdapterRef("a", checkpoint.digest), BASE_MODEL]


def prompts(adapters: Sequence[AdapterRef | NoAdapter]) -> list[ScheduledRequest]:
    """Three, the first with an adapter, so that rows stand in another order than requests."""
    return [
        ScheduledRequest(
            request_id=f"r{index}",
            adapter=adapters[index > 0],
            start=0,
            token_ids=tuple(range(10 * index + 1, 10 * index + 6)),
            block_tables=[(index,)],
            asked=sampling(SampleInput(GREEDY, 0, 5)),
        )
        for index in range(3)
    ]


def next_row(prompt: ScheduledRequest, token_id: int, token_from: int | None) -> ScheduledRequest:
    return replace(
        prompt,
        start=5,
        token_ids=(token_id,),
        token_from=token_from,
        asked=sampling(SampleInput(GREEDY, 0, 6)),
    )


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_penalties_count_a_token_that_the_step_before_draws(model: Path, backend: str) -> None:
    worker, adapters = make_worker(model, backend)
    asked = prompts(adapters)
    worker.submit(SchedulerOutput(1, tuple(asked)))
    drawn = [output.token_ids[0] for output in worker.collect().requests]
    other = next(token_id for token_id in range(50) if token_id not in drawn)

    def again_or_other(index: int) -> ScheduledRequest:
        """Draws the same token again if it is not counted, which the first request never asks."""
        params = SamplingParams(
            temperature=0,
            logit_bias={drawn[index]: 100.0, other: 50.0},
            repetition_penalty=10.0 if index else 1.0,
        )
        row = next_row(asked[index], 0, token_from=index)
        return replace(row, asked=sampling(SampleInput(params, 0, 6, seen_tokens([], []))))

    worker.submit(SchedulerOutput(2, tuple(asked)))
    worker.submit(SchedulerOutput(3, tuple(again_or_other(i) for i in (2, 0, 1))))
    worker.collect()
    told = [output.token_ids[0] for output in worker.collect().requests]
    assert told == [other, drawn[0], other]
    assert len(set(drawn)) > 1


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_row_takes_the_token_that_its_request_drew_before(model: Path, backend: str) -> None:
    worker, adapters = make_worker(model, backend)
    asked = prompts(adapters)
    worker.submit(SchedulerOutput(1, tuple(asked)))
    order = (2, 0, 1)  # the next step lists its requests in another order
    ahead = tuple(next_row(asked[i], 0, token_from=i) for i in order)
    worker.submit(SchedulerOutput(2, ahead))
    drawn = [output.token_ids[0] for output in worker.collect().requests]
    told = worker.collect().requests
    known = tuple(next_row(asked[i], drawn[i], token_from=None) for i in order)
    worker.submit(SchedulerOutput(3, tuple(asked)))
    worker.submit(SchedulerOutput(4, known))
    worker.collect()
    assert worker.collect().requests == told
    assert len(set(drawn)) > 1


def test_two_steps_are_collected_in_the_order_in_which_they_were_submitted(model: Path) -> None:
    worker, adapters = make_worker(model, "reference")
    asked = prompts(adapters)
    for step_id in (7, 8):
        worker.submit(SchedulerOutput(step_id, (asked[step_id - 7],)))
    assert [worker.collect().step_id for _ in range(2)] == [7, 8]


class LateDevice(RecordingDevice):
    """Does what it was asked for only when it is let: until then it has read nothing."""

    is_asynchronous = True

    def __init__(self) -> None:
        super().__init__()
        self._asked: deque[Callable[[], object]] = deque()
        self.outputs: list[Tensor] = []

    def fill(self, target: Tensor, host: HostArray) -> None:
        self._asked.append(lambda: target.copy_(torch.from_numpy(host)))

    def record(self, run: Callable[[], Tensor]) -> RecordedWork:
        return LateWork(self, run)

    def ask(self, work: Callable[[], Tensor]) -> None:
        self._asked.append(lambda: self.outputs.append(work().clone()))

    def do_all(self) -> None:
        while self._asked:
            self._asked.popleft()()


class LateWork:
    def __init__(self, device: LateDevice, run: Callable[[], Tensor]) -> None:
        self._device = device
        self._run = run
        self.output = run()

    def replay(self) -> None:
        self._device.ask(self._run)


class OneHostBuffer(GraphBuffers):
    """A mutant: it builds each step's columns where the step before may still be read from."""

    def fill(self, rows: BatchRows, pending: PendingTokens | None = None) -> None:
        columns = self.__dict__.setdefault("_host", np.zeros((3, self.size), np.int64))
        columns[:, : rows.num_rows] = rows.columns
        self._device.fill(self._columns, columns)


def ignore(*_: object) -> None:
    """The plans of this test's forward, which looks at ids, positions and slots only."""


PLANS = SimpleNamespace(
    new_attention_plan=ignore,
    fill_attention_plan=ignore,
    new_lora_plan=ignore,
    fill_lora_plan=ignore,
)


def columns_of(batch: ForwardBatch) -> Tensor:
    return torch.stack((batch.input_ids, batch.positions, *batch.slot_mapping), dim=1)


@pytest.mark.parametrize("buffers_class", [GraphBuffers, OneHostBuffer])
def test_a_step_is_built_without_touching_what_the_step_in_flight_reads(
    buffers_class: type[GraphBuffers],
) -> None:
    device = LateDevice()
    builder = BatchBuilder(REFERENCE, device, 16, 8, torch.float32, (0,))
    kind = StepKind(is_decode=True, has_adapters=False)
    buffers = buffers_class(device, PLANS, 1, kind, 4, 16, (0,))
    graph = StepGraph(buffers, device.record(buffers.bind(columns_of)), device)
    for position, token_id in ((3, 70), (4, 71)):
        row = ScheduledRequest("r", BASE_MODEL, position, (token_id,), [(2,)])
        graph.run(builder.lay_out([row], {}.__getitem__))
    device.do_all()
    found = [output.tolist() for output in device.outputs]
    assert (found == [[[70, 3, 35]], [[71, 4, 36]]]) == (buffers_class is GraphBuffers)
