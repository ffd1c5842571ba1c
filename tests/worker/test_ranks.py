"""A divided model gives the bits of the whole one: logits, tokens, KV, with adapters."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as GgmlType
from msgspec.structs import replace
from torch import Tensor

from lora_serve.adapter_checkpoint import AdapterCheckpoint, LoRAModule
from lora_serve.bitmask import bitmask_of
from lora_serve.distributed.group import Group
from lora_serve.distributed.in_process import InProcessGroup
from lora_serve.distributed.shares import HeadChannels, RankPlace
from lora_serve.engine.core.executor import Executor
from lora_serve.errors import ConfigError, RankLostError
from lora_serve.identity import BASE_MODEL
from lora_serve.layers.divided_argmax import OPEN, DividedArgmax
from lora_serve.layers.gather import Gather
from lora_serve.models.source import load_spec
from lora_serve.ops._cpu import usable_paths
from lora_serve.ops.cpu import backend
from lora_serve.ops.select import available_ops
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import (
    AskedOutputs,
    KVLoad,
    SampleInput,
    SchedulerOutput,
)
from lora_serve.worker import rank_executor
from lora_serve.worker.rank_server import send_call
from lora_serve.worker.rank_shares import KVShares, adapter_share
from lora_serve.worker.rank_wire import StepDecoder
from lora_serve.worker.worker import Worker
from tests.fakes.gguf_files import save_gguf
from tests.fakes.peft_adapters import make_peft, read_saved
from tests.fakes.rank_lives import DRAWN, GREEDY, chunk, divided, life, prompt_of, whole
from tests.fakes.ranks import make_rank, start_threads
from tests.fakes.tiny_models import ALL_MODELS, FOUR_KV_HEADS, VOCAB_SIZE, save

pytestmark = pytest.mark.skipif("cpu" not in available_ops(), reason="no native CPU kernels")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(ALL_MODELS[FOUR_KV_HEADS].make(), tmp_path_factory.mktemp("ranks") / "model")


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterCheckpoint]:
    spec = load_spec(model)
    return [
        read_saved(make_peft(FOUR_KV_HEADS, seed, r=rank), tmp_path_factory.mktemp("adapter"), spec)
        for seed, rank in enumerate((4, 24))
    ]


def test_that_no_weights_are_kept_is_told_by_one_rank_for_all(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    executor = divided(model, 3, weights_cache_path=str(tmp_path))
    executor.load()
    executor.close()
    told = [each.getMessage() for each in caplog.records if "keeps nothing" in each.getMessage()]
    assert told == [
        f"--weights-cache-path {tmp_path} keeps nothing: each of 3 ranks packs its own share, and "
        "only whole weights are kept; leave it out, or --tensor-parallel-size"
    ]


@pytest.fixture(scope="module")
def vocabulary_adapters(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[AdapterCheckpoint]:
    """One changes biases and rows of tokens; the other all of embeddings and LM head."""
    spec = load_spec(model)
    settings: list[dict[str, Any]] = [
        {"r": 4, "bias": "all", "trainable_token_indices": [1, 100, 20, VOCAB_SIZE - 1]},
        {"r": 24, "target_modules": ["q_proj", "down_proj", "embed_tokens", "lm_head"]},
    ]
    return [
        read_saved(
            make_peft(FOUR_KV_HEADS, seed, **each),
            tmp_path_factory.mktemp("adapter"),
            spec,
            spec.vocabulary(),
        )
        for seed, each in enumerate(settings)
    ]


SETTINGS = [
    {},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "quantization": "int8", "quantize_activations": True},
    {"dtype": "float16", "enforce_eager": True},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_ranks_give_the_bits_of_one(
    model: Path,
    adapters: list[AdapterCheckpoint],
    vocabulary_adapters: list[AdapterCheckpoint],
    settings: dict[str, Any],
) -> None:
    if settings.get("enforce_eager"):  # as their steps are in any case
        adapters = vocabulary_adapters
    expected = life(whole(model, **settings), adapters)
    assert len({result.token_ids for result in expected[-1].requests}) > 1
    for world_size in (2, 4):
        assert life(divided(model, world_size, **settings), adapters) == expected


@pytest.mark.parametrize("world_size", [3, 6])
def test_ranks_need_not_divide_the_heads(
    model: Path, adapters: list[AdapterCheckpoint], world_size: int
) -> None:
    """One of 3 has more KV heads than others; some of 6 have the same one."""
    expected = life(whole(model), adapters)
    assert life(divided(model, world_size), adapters) == expected


CODES = {"dtype": "bfloat16", "quantization": "int8"}
FAMILIES = [
    *("qwen3", "gemma2", "gemma3", "mistral", "phi3", "glm4"),
    *("cohere-plus", "olmoe", "qwen2-moe", "gpt-oss", "granite-moe-shared"),
]


@pytest.mark.parametrize(
    ("family", "settings"), [*((family, {}) for family in FAMILIES), ("olmoe", CODES)], ids=str
)
def test_families_are_divided(
    family: str, settings: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = save(ALL_MODELS[family].make(), tmp_path / "model")
    expected = life(whole(directory, **settings), [])
    with caplog.at_level("INFO"):
        assert life(divided(directory, 3, **settings), []) == expected, "ranks of uneven shares"
    assert "not recorded" not in caplog.text


def test_experts_of_codes_are_divided(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = save_gguf(ALL_MODELS["olmoe"].make(), tmp_path / "m.gguf", lambda _: GgmlType.Q8_0)
    on_experts = ["experts.gate_up_proj", "experts.down_proj"]
    theirs = make_peft("olmoe", seed=2, target_parameters=on_experts)
    adapter = read_saved(theirs, tmp_path / "adapter", load_spec(file))
    with caplog.at_level("INFO"):
        expected = life(whole(file), [adapter])
    assert "(30 of experts)" in caplog.text
    assert life(divided(file, 2), [adapter]) == expected
    assert life(whole(file, enforce_eager=True), [adapter]) == expected
    attention_alone = [module for module in adapter.modules if ".experts." not in module.name]
    assert len(attention_alone) < len(adapter.modules)
    other = dataclasses.replace(adapter, modules=tuple(attention_alone))
    assert life(whole(file), [other]) != expected


@pytest.mark.parametrize("sizes", [(1, 4), (2, 1), (2, 4), (6, 2), (2, 3)], ids=str)
def test_kv_of_one_number_of_ranks_is_read_by_another(model: Path, sizes: tuple[int, int]) -> None:
    prompt, owner = prompt_of(5, 33), BASE_MODEL
    with ExitStack() as stack:
        writer, reader = (divided(model, size) if size > 1 else whole(model) for size in sizes)
        infos = [executor.load() for executor in (writer, reader)]
        for executor in (writer, reader):
            stack.callback(executor.close)
        assert dataclasses.replace(infos[0], num_threads=1) == infos[1]
        writer.submit(SchedulerOutput(0, (chunk(0, prompt[:32], 0, owner, None, 1),)))
        writer.collect()
        writer.submit(SchedulerOutput(1, (), kv_saves=(0, 1)))
        records = writer.collect().kv_saves
        last = chunk(0, prompt[32:], 32, owner, GREEDY, 1)
        writer.submit(SchedulerOutput(2, (last,)))
        loads = tuple(map(KVLoad, (0, 1), records))
        reader.submit(SchedulerOutput(2, (last,), kv_loads=loads))
        assert reader.collect().requests == writer.collect().requests


def test_ranks_screen_the_lm_head_together(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a grammar allows few tokens, all of one rank."""
    monkeypatch.setattr(backend, "SCREENING_PATHS", usable_paths())
    found: list[int] = []
    call = DividedArgmax.__call__

    def noted(argmax: DividedArgmax, x: Tensor, bitmasks: list[bytes | None]) -> list[int]:
        found.extend(tokens := call(argmax, x, bitmasks))
        return tokens

    monkeypatch.setattr(DividedArgmax, "__call__", noted)
    plain, few = SamplingParams(temperature=0.0), bitmask_of([VOCAB_SIZE - 2], VOCAB_SIZE)

    def answers(executor: Executor) -> list[tuple[int, ...]]:
        executor.load()
        tokens = [prompt_of(index, 20 + index) for index in range(3)]
        starts, results = [0, 0, 0], []
        for step in range(4):
            requests = [
                chunk(i, known[start:], start, BASE_MODEL, plain, 1)
                for i, (known, start) in enumerate(zip(tokens, starts, strict=True))
            ]
            if step == 2:
                samples = (replace(requests[1].asked.samples[0], bitmask=few),)
                requests[1] = replace(requests[1], asked=AskedOutputs(samples))
            starts = list(map(len, tokens))
            executor.submit(SchedulerOutput(step, tuple(requests)))
            for known, result in zip(tokens, executor.collect().requests, strict=True):
                known += result.token_ids
                results.append(result.token_ids)
        executor.close()
        return results

    expected = answers(whole(model, lm_head_screen="off"))
    for world_size in (2, 4):
        assert answers(divided(model, world_size, lm_head_screen="on")) == expected
    assert set(found) > {OPEN, VOCAB_SIZE - 2}, "some by their rank, and one that a mask allows"


class FullWorker(Worker):
    """A rank whose memory holds no adapter."""

    def prepare_adapter(self, checkpoint: AdapterCheckpoint) -> None:
        raise MemoryError("no room")


@pytest.mark.parametrize("full_rank", [0, 1])
def test_an_adapter_is_ready_on_all_ranks_or_on_none(
    model: Path, adapters: list[AdapterCheckpoint], full_rank: int
) -> None:
    workers: dict[int, Worker] = {}

    def make(group: Group) -> Worker:
        kind = FullWorker if group.rank == full_rank else Worker
        workers[group.rank] = make_rank(model, group, kind=kind)
        return workers[group.rank]

    executor = start_threads(2, make)
    executor.load()
    with pytest.raises(MemoryError, match="no room"):
        executor.prepare_adapter(adapters[0])
    for worker in workers.values():
        assert not worker._adapters._prepared
    executor.close()


@pytest.mark.parametrize("unlucky", [0, 1, 2])
def test_a_share_that_cannot_be_made_reaches_no_rank(
    model: Path,
    adapters: list[AdapterCheckpoint],
    monkeypatch: pytest.MonkeyPatch,
    unlucky: int,
) -> None:
    """What follows is told of itself, not of the load that failed."""
    workers: dict[int, Worker] = {}

    def make(group: Group) -> Worker:
        workers[group.rank] = make_rank(model, group)
        return workers[group.rank]

    def share(checkpoint: AdapterCheckpoint, *more: Any) -> AdapterCheckpoint:
        if more[-1].rank == unlucky:
            raise MemoryError("no room for a share")
        return adapter_share(checkpoint, *more)

    executor = start_threads(3, make)
    executor.load()
    with monkeypatch.context() as patch:
        patch.setattr(rank_executor, "adapter_share", share)
        with pytest.raises(MemoryError, match="no room for a share"):
            executor.prepare_adapter(adapters[0])
    assert not any(worker._adapters._prepared for worker in workers.values())
    executor.prepare_adapter(adapters[0])
    assert all(worker._adapters._prepared for worker in workers.values())
    executor.close()


def test_an_adapter_that_may_have_reached_some_ranks_alone_ends_the_engine(
    model: Path, adapters: list[AdapterCheckpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count()

    def send(*call: Any) -> None:
        if next(calls):
            raise MemoryError("no room for a message")
        send_call(*call)

    executor = start_threads(3, lambda group: make_rank(model, group))
    executor.load()
    monkeypatch.setattr(rank_executor, "send_call", send)
    with pytest.raises(RankLostError, match="some ranks alone: no room"):
        executor.prepare_adapter(adapters[0])
    with pytest.raises(RankLostError, match="some ranks alone"):
        executor.prepare_adapter(adapters[1])
    executor.close()


def test_a_ranks_own_error_at_an_adapter_is_told(
    model: Path, adapters: list[AdapterCheckpoint]
) -> None:
    class FaultyWorker(Worker):
        def prepare_adapter(self, checkpoint: AdapterCheckpoint) -> None:
            raise KeyError("a bug of ours")

    executor = start_threads(
        2, lambda group: make_rank(model, group, kind=FaultyWorker if group.rank else Worker)
    )
    executor.load()
    with pytest.raises(
        RuntimeError, match="rank 1 could not prepare it: KeyError: 'a bug of ours'"
    ):
        executor.prepare_adapter(adapters[0])
    executor.close()


def test_a_model_that_ranks_cannot_divide_is_refused_in_one_line(model: Path) -> None:
    executor = divided(model, 9)
    with pytest.raises(ConfigError, match=r"9 is above the model's 8 attention heads; lower it"):
        executor.load()


def test_ranks_with_other_weights_are_refused(model: Path, tmp_path: Path) -> None:
    other = save(ALL_MODELS["qwen2"].make(), tmp_path / "other")
    executor = start_threads(2, lambda group: make_rank(other if group.rank else model, group))
    with pytest.raises(ConfigError, match="rank 1 has other weights or kernels than rank 0"):
        executor.load()


def test_pending_tokens_reach_all_ranks(model: Path) -> None:
    """The next step is submitted before this one's tokens are known to the host."""

    def drawn(executor: Executor) -> list[tuple[int, ...]]:
        executor.load()
        prompt = prompt_of(0, 20)
        executor.submit(SchedulerOutput(0, (chunk(0, prompt, 0, BASE_MODEL, DRAWN, 1),)))
        tokens = []
        for step_id in range(1, 6):
            pending = replace(chunk(0, [0], 19 + step_id, BASE_MODEL, DRAWN, 1), token_from=0)
            executor.submit(SchedulerOutput(step_id, (pending,)))
            tokens.append(executor.collect().requests[0].token_ids)
        tokens.append(executor.collect().requests[0].token_ids)
        executor.close()
        return tokens

    expected = drawn(whole(model))
    assert len(set(expected)) > 2
    assert drawn(divided(model, 2)) == expected


def test_ranks_verify_drafts(model: Path) -> None:
    def verified(executor: Executor) -> list[tuple[int, ...]]:
        executor.load()
        tokens, sampled = prompt_of(0, 20), []
        for drafts in ([], [3, 4], [9]):
            start = max(0, len(tokens) - 1) if sampled else 0
            new = [*tokens[start:], *drafts]
            known = chunk(0, new, start, BASE_MODEL, None, 1)
            samples = tuple(
                SampleInput(DRAWN, seed=1, position=len(tokens) + i) for i in range(1 + len(drafts))
            )
            request = replace(known, asked=AskedOutputs(samples))
            executor.submit(SchedulerOutput(0, (request,)))
            sampled.append(executor.collect().requests[0].token_ids)
            tokens += sampled[-1]
        executor.close()
        return sampled

    assert verified(divided(model, 2)) == verified(whole(model))


# ── faults put in on purpose: each must show in what comes out ──────────────────────────────────


def test_rows_that_others_may_write_to_before_they_are_read_show(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embeddings are added to by all layers, so they must not lie where ranks gather next."""
    expected = life(whole(model), [])
    rows = Gather._rows

    def all_in_common(gather: Gather, *shape: Any) -> Tensor:
        gather._is_passing = True
        return rows(gather, *shape)

    monkeypatch.setattr(Gather, "_rows", all_in_common)
    assert life(divided(model, 2), []) != expected


def test_a_rank_that_is_a_step_behind_shows(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = life(whole(model), [])
    decode = StepDecoder.decode
    before: list[SchedulerOutput] = []

    def decode_late(decoder: StepDecoder, message: bytes) -> tuple[SchedulerOutput, bool]:
        step, has_loads = decode(decoder, message)
        before.append(step)
        late = before[-2] if len(before) > 1 else step
        if late.num_tokens == step.num_tokens:  # else the others would wait for its rows
            step = replace(step, requests=late.requests)
        return step, has_loads

    monkeypatch.setattr(StepDecoder, "decode", decode_late)
    assert life(divided(model, 2), []) != expected


def test_parts_in_another_order_show(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = life(whole(model), [])
    gather = InProcessGroup.gather

    def swapped(
        group: InProcessGroup,
        part: Tensor,
        widths: list[int],
        whole: Tensor,
        **how: bool,
    ) -> None:
        gather(group, part, widths, whole, **how)
        if len(set(widths)) == 1 and whole.shape[1] > 8:
            whole.copy_(whole.roll(widths[0], dims=1))

    monkeypatch.setattr(InProcessGroup, "gather", swapped)
    assert life(divided(model, 2), []) != expected


def test_an_adapter_on_one_rank_alone_shows(
    model: Path, adapters: list[AdapterCheckpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = life(whole(model), adapters)
    prepare = Worker.prepare_adapter

    def prepare_zeros(worker: Worker, checkpoint: AdapterCheckpoint) -> None:
        modules = checkpoint.modules
        if worker._group.rank:
            modules = tuple(_without_delta(module) for module in modules)
        prepare(worker, dataclasses.replace(checkpoint, modules=modules))

    monkeypatch.setattr(Worker, "prepare_adapter", prepare_zeros)
    assert life(divided(model, 2), adapters) != expected


def test_kv_of_other_heads_shows(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = KVShares.split

    def of_another_rank(
        shares: KVShares, loads: list[KVLoad], place: RankPlace
    ) -> tuple[KVLoad, ...]:
        return split(shares, loads, RankPlace(1 - place.rank, 2))

    monkeypatch.setattr(KVShares, "split", of_another_rank)
    with pytest.raises(AssertionError):
        test_kv_of_one_number_of_ranks_is_read_by_another(model, (1, 2))


def test_a_rank_that_keeps_its_neighbours_kv_head_shows(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = life(whole(model), [])
    share = HeadChannels.share

    def of_a_neighbour(channels: HeadChannels, place: RankPlace) -> range:
        is_wrong = channels.are_kv and place.rank == 1
        return share(channels, RankPlace(2, 6) if is_wrong else place)

    monkeypatch.setattr(HeadChannels, "share", of_a_neighbour)
    assert life(divided(model, 6), []) != expected


def _without_delta(module: LoRAModule) -> LoRAModule:
    zeros = dataclasses.replace(module.b, data=memoryview(bytes(module.b.data.nbytes)))
    return dataclasses.replace(module, b=zeros)
