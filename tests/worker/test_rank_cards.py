"""Ranks that have a card each: refusals, memory, steps that overlap, ranks that are lost.

No card is needed: devices and links here keep the rules of cards (tests/fakes/device.py).
"""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from lora_serve.config import (
    CacheConfig,
    EngineConfig,
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from lora_serve.distributed import card_group
from lora_serve.distributed.card_group import CardGroup
from lora_serve.distributed.group import ALONE, Group
from lora_serve.distributed.limits import TimeLimit
from lora_serve.distributed.link import Link, new_link
from lora_serve.distributed.torch_group import open_gloo
from lora_serve.errors import ConfigError, RankLostError
from lora_serve.identity import BASE_MODEL
from lora_serve.models.source import load_spec
from lora_serve.ops.select import available_ops
from lora_serve.step import ModelRunnerOutput, SchedulerOutput
from lora_serve.worker import rank_process
from lora_serve.worker.cuda_device import CudaDevice, CudaEvent
from lora_serve.worker.device import CpuDevice
from lora_serve.worker.rank_cards import check_cards, wait_for_ranks
from lora_serve.worker.rank_server import RankLinks, serve_rank
from lora_serve.worker.rank_wire import StepEncoder
from lora_serve.worker.rendezvous import Rendezvous
from lora_serve.worker.worker import Worker
from tests.fakes.device import CountingDevice
from tests.fakes.peft_adapters import make_peft, read_saved
from tests.fakes.rank_lives import GREEDY, chunk, life, whole
from tests.fakes.ranks import LIMIT, SECONDS, start_threads
from tests.fakes.tiny_models import ALL_MODELS, FOUR_KV_HEADS, save

needs_native = pytest.mark.skipif("cpu" not in available_ops(), reason="no native CPU kernels")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(ALL_MODELS[FOUR_KV_HEADS].make(), tmp_path_factory.mktemp("ranks") / "model")


@pytest.mark.parametrize(
    ("settings", "num_cards", "told"),
    [
        ({"tensor_parallel_size": 3}, 2, "size 3 is above the 2 GPUs that torch sees"),
        ({"tensor_parallel_size": 2}, 1, "size 2 is above the 1 GPU that torch sees"),
        ({"tensor_parallel_backend": "gloo"}, 2, "--tensor-parallel-backend gloo goes through"),
        ({"cpu_ranks": "auto"}, 2, "--cpu-ranks auto is for CPUs alone"),
    ],
)
def test_what_cards_cannot_do_is_refused(
    settings: dict[str, Any], num_cards: int, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_cards)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    check_cards(ParallelConfig(tensor_parallel_size=num_cards, tensor_parallel_backend="nccl"))
    with pytest.raises(ConfigError, match=told):
        check_cards(ParallelConfig(**{"tensor_parallel_size": 2, **settings}))


def test_ranks_on_cards_need_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match="was built without NCCL"):
        check_cards(ParallelConfig(tensor_parallel_size=2))


def test_a_step_is_waited_for_until_a_rank_is_lost_or_hangs() -> None:
    looks = iter([False, False, True])
    wait_for_ranks(lambda: next(looks), LIMIT, lambda: None)

    def check() -> None:
        raise RankLostError("rank 1 has ended")

    with pytest.raises(RankLostError, match="rank 1 has ended"):
        wait_for_ranks(lambda: False, LIMIT, check)
    with pytest.raises(
        RankLostError, match=r"^a rank hangs: a step has not ended in 0.01 s; raise -"
    ):
        wait_for_ranks(lambda: False, TimeLimit(0.01, "--step-timeout"), lambda: None)


@pytest.mark.parametrize("has_ranks", [True, False])
def test_a_card_that_meets_others_is_looked_at_again_and_again(
    has_ranks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is alone wakes who waits for it; but work that others never come to has no end."""
    told: list[str] = []

    class CardsEvent:
        def record(self) -> None:
            told.append("recorded")

        def query(self) -> bool:
            told.append("looked at")
            return told.count("looked at") == 2

        def synchronize(self) -> None:
            told.append("waited for")

    monkeypatch.setattr(torch.cuda, "Event", CardsEvent)
    wait = partial(wait_for_ranks, limit=LIMIT, check=lambda: None)
    CudaEvent(wait if has_ranks else None).wait()
    assert told == ["recorded", *(["looked at"] * 2 if has_ranks else ["waited for"])]


class LostRank(RankLostError):
    """What who waits for a card finds when a rank has ended."""


def find_it_lost(_: Any) -> None:
    raise LostRank("rank 1 has ended")


@pytest.mark.parametrize(
    ("call", "before"),
    [("peak_bytes", ["recorded", "waited for", "run"]), ("record", ["run", "run"])],
)
def test_all_of_a_cards_work_is_waited_for_only_when_ranks_have_done_theirs(
    call: str, before: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that waits for the whole card has no end of its own."""
    told: list[str] = []

    class CardsEvent:
        record = staticmethod(lambda: told.append("recorded"))
        query = staticmethod(lambda: False)

    def is_lost_in_work(_: Any) -> None:
        if "run" in told:
            raise LostRank("rank 1 has ended")

    for name in (
        *("set_device", "current_device", "get_device_name", "Stream", "graph_pool_handle"),
        *("reset_peak_memory_stats", "memory_allocated"),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "Event", CardsEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: told.append("waited for"))
    device = CudaDevice(0, load_until=is_lost_in_work)
    with pytest.raises(LostRank):
        getattr(device, call)(lambda: told.append("run"))
    assert told == [*before, "recorded"]


def test_steps_that_are_tried_while_loading_wait_as_long_as_loading_may_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another rank may still compile its kernels then."""
    told: list[str] = []
    for name in (
        *("set_device", "current_device", "get_device_name", "Stream", "graph_pool_handle"),
        *("reset_peak_memory_stats", "memory_allocated", "max_memory_allocated"),
        *("empty_cache", "synchronize"),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "Event", Mock)
    device = CudaDevice(0, lambda _: told.append("a step's"), lambda _: told.append("a load's"))
    device.peak_bytes(lambda: device.record_event().wait())
    device.record_event().wait()
    assert told == ["a load's", "a load's", "a load's", "a step's"]


class LosableCard(CpuDevice):
    """Another rank may be lost in its work."""

    is_lost = False

    def record_event(self) -> Any:
        event = super().record_event()
        if self.is_lost:
            event.wait = partial(find_it_lost, event)
        return event


@needs_native
def test_prompt_logprobs_are_not_read_of_a_card_that_waits_for_a_lost_rank(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = LosableCard()
    worker = Worker(
        ModelConfig(model=str(model), cpu_threads=1),
        CacheConfig(num_gpu_blocks_override=64),
        LoRAConfig(),
        max_num_seqs=1,
        max_num_batched_tokens=32,
        device=card,
    )
    worker.load()
    read: list[int] = []
    sampler = worker._runner._sampler
    token_logprobs = sampler.token_logprobs

    def noted(*asked: Any) -> Any:
        read.append(len(asked[1]))
        return token_logprobs(*asked)

    monkeypatch.setattr(sampler, "token_logprobs", noted)
    step = SchedulerOutput(0, (chunk(0, [1, 2, 3], 0, BASE_MODEL, GREEDY, 1),))
    worker.submit(step)
    assert read == [2]
    card.is_lost = True
    with pytest.raises(LostRank):
        worker.submit(step)
    assert read == [2]


@needs_native
def test_ranks_that_meet_wait_for_each_other_with_an_end(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = LosableCard()
    card.is_lost = True
    monkeypatch.setattr(rank_process, "open_card", lambda *_: card)
    monkeypatch.setattr(rank_process, "open_group", lambda *_: ALONE)
    monkeypatch.setattr(rank_process, "open_card_group", lambda *_: ALONE)
    config = EngineConfig(model=ModelConfig(model=str(model)))
    with pytest.raises(LostRank):
        rank_process.make_worker(0, config, Rendezvous(card_store=tmp_path), None)


@needs_native
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_meet_as_cards_do_give_the_bits_of_one(
    model: Path, tmp_path: Path, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They make the calls that NCCL gets, which gloo does here for tensors of the CPU."""
    adapters = [
        read_saved(make_peft(FOUR_KV_HEADS, rank, r=rank), tmp_path / str(rank), load_spec(model))
        for rank in (4, 24)
    ]
    opened: list[int] = []

    def open_cpu(rank: int, *_: object) -> CpuDevice:
        opened.append(rank)
        return CpuDevice()

    monkeypatch.setattr(rank_process, "open_card", open_cpu)
    monkeypatch.setattr(card_group, "open_nccl", open_gloo)
    config = EngineConfig(
        model=ModelConfig(model=str(model), dtype="bfloat16", cpu_threads=1),
        cache=CacheConfig(num_gpu_blocks_override=64),
        lora=LoRAConfig(enable_lora=True, max_loras=2),
        scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=256),
        parallel=ParallelConfig(tensor_parallel_size=world_size),
    )
    place = Rendezvous(store=tmp_path / "hosts", card_store=tmp_path / "cards")

    def make(group: Group) -> Worker:
        worker = rank_process.make_worker(group.rank, config, place, None)
        assert isinstance(worker._group, CardGroup)
        return worker

    expected = life(whole(model, dtype="bfloat16"), adapters)
    assert life(start_threads(world_size, make), adapters) == expected
    assert sorted(opened) == [*range(world_size)], "a card each"


@needs_native
def test_kv_is_what_the_fullest_card_has_room_for(model: Path) -> None:
    """Each has its budget, less its own weights and its own largest step."""

    def num_blocks(free: tuple[int, int]) -> int:
        def make(group: Group) -> Worker:
            device = CountingDevice(free[group.rank], weight_bytes=10_000, peaks=[5_000] * 9)
            return Worker(
                ModelConfig(model=str(model), cpu_threads=1, enforce_eager=True),
                CacheConfig(gpu_memory_utilization=0.5),
                LoRAConfig(),
                max_num_seqs=4,
                max_num_batched_tokens=32,
                device=device,
                group=group,
            )

        executor = start_threads(2, make)
        info = executor.load()
        executor.close()
        return info.num_blocks

    one, more = 2 * 10_000_000, 2 * 20_000_000
    block_bytes = 2 * 16 * 4 * 16 * 4 * 3  # K and V, tokens, KV heads, channels, float32, layers
    half = block_bytes // 2
    assert num_blocks((one, more)) == num_blocks((more, one)) == (one // 2 - 15_000) // half
    assert num_blocks((more, more)) == (more // 2 - 15_000) // half


class SlowCard:
    """A worker whose steps end when the test says so."""

    def __init__(self) -> None:
        self.submitted: list[int] = []
        self.collected: list[int] = []
        self.num_ended = 0
        self.seen = threading.Condition()

    def load(self) -> None: ...

    def submit(self, step: SchedulerOutput) -> None:
        with self.seen:
            self.submitted.append(step.step_id)
            self.seen.notify_all()

    def has_ended(self) -> bool:
        return self.num_ended > len(self.collected)

    def collect(self) -> ModelRunnerOutput:
        assert self.has_ended(), "it waits for a card, and takes no step meanwhile"
        step_id = self.submitted[len(self.collected)]
        with self.seen:
            self.collected.append(step_id)
            self.seen.notify_all()
        return ModelRunnerOutput(step_id, (), (bytes([step_id]),))

    def wait_for(self, steps: list[int], which: list[int]) -> None:
        with self.seen:
            assert self.seen.wait_for(lambda: which == steps, SECONDS), (steps, which)


def test_a_rank_takes_the_next_step_while_its_card_is_at_this_one() -> None:
    (steps, its_steps), (calls, its_calls) = new_link("a rank"), new_link("a rank")
    its = RankLinks(Link(its_steps, "the first rank"), Link(its_calls, "the first rank"))
    card, encoder = SlowCard(), StepEncoder()
    thread = threading.Thread(target=serve_rank, args=(card, its))
    thread.start()
    steps.receive(LIMIT)
    for step_id in range(2):
        request = chunk(0, [1, 2, 3], 0, BASE_MODEL, GREEDY, 1)
        step = SchedulerOutput(step_id, (request,), kv_saves=(0,))
        steps.send(encoder.encode(step), limit=LIMIT)
        card.wait_for([*range(step_id + 1)], card.submitted)
    assert not card.collected
    card.num_ended = 1
    card.wait_for([0], card.collected)
    assert steps.receive(LIMIT).endswith(b"\0"), "KV goes out, though no further step came"
    card.num_ended = 2
    card.wait_for([0, 1], card.collected)
    assert steps.receive(LIMIT).endswith(b"\1")
    for link in (steps, calls):
        link.close()
    thread.join(SECONDS)
    assert not thread.is_alive()
    its.close()
