from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from lora_serve.config import CacheConfig, LoRAConfig, ModelConfig
from lora_serve.errors import ConfigError
from lora_serve.identity import BASE_MODEL, AdapterRef, NoAdapter
from lora_serve.models.base import lora_modules
from lora_serve.models.decoder import Decoder
from lora_serve.models.source import load_spec
from lora_serve.ops.reference import REFERENCE
from lora_serve.ops.select import available_ops
from lora_serve.pooling import sums_added
from lora_serve.prompts import PlacedRows
from lora_serve.sampling.specification.logprobs import token_logprobs
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import (
    NOTHING_ASKED,
    AskedOutputs,
    PromptScoring,
    RequestStepOutput,
    SampleInput,
    ScheduledRequest,
    SchedulerOutput,
)
from lora_serve.worker.kv_cache import kv_block_bytes
from lora_serve.worker.memory import largest_adapter_bytes
from lora_serve.worker.pooling import summed_rows
from lora_serve.worker.worker import Worker
from tests.fakes.asked import sampling, scoring
from tests.fakes.device import CountingDevice
from tests.fakes.peft_adapters import make_peft, read_saved
from tests.fakes.tiny_models import ALL_MODELS, VOCAB_SIZE, save

BACKENDS = pytest.mark.parametrize("backend", available_ops())
ALL_LOGPROBS = SamplingParams(temperature=0.0, logprobs=VOCAB_SIZE)
PROMPT = [(11 * i + 3) % VOCAB_SIZE for i in range(40)]


def make_worker(directory: Path, backend: str = "reference", **settings: Any) -> Worker:
    """A worker with 64 blocks; settings are ModelConfig's."""
    return Worker(
        ModelConfig(model=str(directory), override_op=(f"all={backend}",), **settings),
        CacheConfig(num_gpu_blocks_override=64),
        LoRAConfig(enable_lora=True, max_loras=2),
        max_num_seqs=4,
        max_num_batched_tokens=256,
    )


@pytest.fixture
def model(directories: dict[str, Path], tmp_path: Path) -> Path:
    """A Qwen2 directory that a test may change."""
    return shutil.copytree(directories["qwen2"], tmp_path / "model")


@pytest.fixture
def worker(model: Path) -> Worker:
    worker = make_worker(model)
    worker.load()
    return worker


def request(
    token_ids: list[int],
    start: int = 0,
    *,
    first_block: int = 0,
    adapter: AdapterRef | NoAdapter = BASE_MODEL,
    samples: bool = True,
) -> ScheduledRequest:
    """Everything from `start` on; samples greedily with all logprobs."""
    num_blocks = -(-len(token_ids) // 16)
    return ScheduledRequest(
        request_id=f"r{first_block}",
        adapter=adapter,
        start=start,
        token_ids=token_ids[start:],
        block_tables=[range(first_block, first_block + num_blocks)],
        asked=sampling(SampleInput(ALL_LOGPROBS, 0, len(token_ids))) if samples else NOTHING_ASKED,
    )


def run(worker: Worker, *requests: ScheduledRequest) -> tuple[RequestStepOutput, ...]:
    worker.submit(SchedulerOutput(5, requests))
    output = worker.collect()
    assert output.step_id == 5
    return output.requests


# ── load ────────────────────────────────────────────────────────────────────────────────────────


def test_load_tells_what_it_found(model: Path) -> None:
    info = make_worker(model).load()
    assert len(info.fingerprint) == 32
    assert (info.dtype, info.vocab_size, info.hidden_size) == ("float32", VOCAB_SIZE, 64)
    assert (info.max_model_len, info.num_blocks) == (1024, 64)
    assert info.kernels.startswith("reference")
    assert info.lora_modules["model.layers.0.mlp.up_proj"] == (96, 64)


def test_settings_go_before_the_models_own(model: Path) -> None:
    info = make_worker(model, dtype="bfloat16", max_model_len=100).load()
    assert (info.dtype, info.max_model_len) == ("bfloat16", 100)


def test_threads_are_set_as_asked(model: Path) -> None:
    make_worker(model, cpu_threads=2).load()
    assert torch.get_num_threads() == 2


def test_more_tokens_than_the_model_has_positions_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="--max-model-len 1025 is above the 1024 positions"):
        make_worker(model, max_model_len=1025).load()


def test_an_unknown_dtype_of_the_checkpoint_is_refused(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "dtype": "float64"}))
    with pytest.raises(ConfigError, match="dtype float64 is not supported; set --dtype"):
        make_worker(model).load()
    assert make_worker(model, dtype="float32").load().dtype == "float32"


def test_dummy_weights_need_no_file(model: Path) -> None:
    (model / "model.safetensors").unlink()
    first, other = (make_worker(model, load_format="dummy", seed=seed) for seed in (1, 2))
    assert first.load().fingerprint != other.load().fingerprint
    assert run(first, request(PROMPT))[0].token_ids[0] in range(VOCAB_SIZE)


def test_the_fingerprint_follows_the_weights_and_the_dtype(
    model: Path, directories: dict[str, Path]
) -> None:
    first = make_worker(model).load().fingerprint
    assert make_worker(model).load().fingerprint == first
    assert make_worker(directories["mistral"]).load().fingerprint != first
    assert make_worker(model, dtype="bfloat16").load().fingerprint != first


@pytest.mark.parametrize(("backend", "graphs"), [("reference", 0), ("cpu", 3_000_000)])
def test_a_gpus_memory_is_divided_by_what_its_largest_steps_take(
    model: Path, backend: str, graphs: int
) -> None:
    """What a step takes is the device's to tell; here the tests' own makes it up."""
    weights, step, room = 7_000_000, 1_000_000, 90_000_000
    of_linears = largest_adapter_bytes(load_spec(model).linears(), 64, 4)
    vocab_bytes = 4 * 2 * (VOCAB_SIZE * 64 + 64 * (VOCAB_SIZE + 64))  # copies, and deltas
    adapters = (8 * 2 + 1) * (of_linears + vocab_bytes)
    free = weights + step + graphs + adapters + room
    peaks = [step // 2, step, step // 9, *([graphs] if graphs else [])]
    device = CountingDevice(2 * free, weights, peaks)
    worker = Worker(
        ModelConfig(model=str(model), override_op=(f"all={backend}",)),
        CacheConfig(gpu_memory_utilization=0.5),
        LoRAConfig(enable_lora=True, max_loras=2),
        max_num_seqs=4,
        max_num_batched_tokens=256,
        device=device,
    )
    block_bytes = kv_block_bytes(load_spec(model).kv_specs(), REFERENCE, 16, torch.float32)
    assert worker.load().num_blocks == room // block_bytes
    assert not peaks, "not all was measured"
    assert None not in device.measured, "what was measured computed nothing"
    assert device.num_loads == 1, "the largest adapter was there"


def test_a_gpu_sets_memory_aside_for_experts_where_adapters_may_change_them(tmp_path: Path) -> None:
    """The largest adapter changes them, too, so that a step with it is measured."""
    directory = save(ALL_MODELS["olmoe"].make(), tmp_path / "model")
    spec = load_spec(directory)

    def blocks_and_modules(expert_rank: int | None) -> tuple[int, set[str]]:
        worker = Worker(
            ModelConfig(model=str(directory), override_op=("all=reference",)),
            CacheConfig(gpu_memory_utilization=1.0),
            LoRAConfig(enable_lora=True, max_loras=2, max_lora_expert_rank=expert_rank),
            max_num_seqs=4,
            max_num_batched_tokens=64,
            device=CountingDevice(2**28, 0, [0] * 3),
        )
        info = worker.load()
        return info.num_blocks, {name for name in info.lora_modules if ".experts." in name}

    without, none = blocks_and_modules(None)
    beside, modules = blocks_and_modules(5)
    assert not none
    assert modules == set(lora_modules(spec.expert_linears()))
    block_bytes = kv_block_bytes(spec.kv_specs(), REFERENCE, 16, torch.float32)
    set_aside = (8 * 2 + 1) * largest_adapter_bytes(spec.expert_linears(), 5, 4)
    assert set_aside // block_bytes <= without - beside <= set_aside // block_bytes + 1


# ── execute ─────────────────────────────────────────────────────────────────────────────────────


def test_a_step_without_requests_gives_nothing(worker: Worker) -> None:
    assert run(worker) == ()


def test_a_request_that_does_not_sample_gets_no_token(worker: Worker) -> None:
    assert run(worker, request(PROMPT[:16], samples=False)) == (RequestStepOutput(),)


@BACKENDS
def test_results_come_in_the_steps_order_and_as_if_alone(model: Path, backend: str) -> None:
    worker = make_worker(model, backend)
    worker.load()
    adapters = [load(worker, model.parent / str(seed), seed) for seed in (1, 2)]
    requests = [
        request(PROMPT, first_block=0, adapter=adapters[1]),
        request(PROMPT[:17], first_block=10, samples=False),
        request(PROMPT[5:], first_block=20),
        request(PROMPT, first_block=30, adapter=adapters[0]),
    ]
    alone = [run(worker, one)[0] for one in requests]
    together = run(worker, *requests)
    assert together == tuple(alone)
    assert len({output.logprobs for output in alone}) == 4


def test_torch_picks_and_copies_nothing_in_native_steps_of_decodes(model: Path) -> None:
    """Its threads would spin for milliseconds where the kernels' threads compute."""
    pytest.importorskip("lora_serve.ops._cpu", reason="NOT BUILT: the native kernels")
    worker = make_worker(model, "cpu", dtype="bfloat16")
    worker.load()
    prompts = [PROMPT[i:] for i in range(4)]
    for i, prompt in enumerate(prompts):
        run(worker, request(prompt[:-1], first_block=8 * i, samples=False))
    decodes = [
        request(prompt, len(prompt) - 1, first_block=8 * i) for i, prompt in enumerate(prompts)
    ]
    with CalledOps() as called:
        worker.submit(SchedulerOutput(5, tuple(decodes), kv_saves=(0, 8, 16, 24)))
        worker.collect()
    assert not called.names & {"aten::index", "aten::index_select", "aten::cat"}


class CalledOps(TorchDispatchMode):
    """names: of the torch operations that were called meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        self.names.add(func._schema.name)
        return func(*args, **(kwargs or {}))


@BACKENDS
def test_prompt_logprobs_are_those_of_sampling_at_each_position(model: Path, backend: str) -> None:
    worker = make_worker(model, backend)
    worker.load()
    asking = replace(request(PROMPT), asked=scoring(PROMPT[1:], VOCAB_SIZE))
    found = run(worker, request(PROMPT[:9], first_block=20), asking)[1].prompt_logprobs
    assert [each.token_id for each in found] == PROMPT[1:]
    for position, each in enumerate(found):
        (sampled,) = run(worker, request(PROMPT[: position + 1], first_block=20))[0].logprobs
        assert each.top == sampled.top
        assert each.logprob == dict(sampled.top)[each.token_id]


def test_many_prompt_logprobs_are_found_slice_by_slice(worker: Worker) -> None:
    token_ids = [i % VOCAB_SIZE for i in range(256)]
    asking = replace(request(token_ids), asked=scoring(token_ids[1:], 1))
    assert len(run(worker, asking)[0].prompt_logprobs) == 255
    rest = replace(asking, start=10, token_ids=token_ids[10:], asked=scoring(token_ids[11:], 1))
    assert run(worker, rest)[0].prompt_logprobs == run(worker, asking)[0].prompt_logprobs[10:]
    end = replace(asking, asked=AskedOutputs((), PromptScoring(token_ids[11:], 1, first_row=10)))
    assert run(worker, end)[0].prompt_logprobs == run(worker, asking)[0].prompt_logprobs[10:]


@BACKENDS
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embedding_rows_answer_as_the_tokens_they_come_from(
    model: Path, backend: str, dtype: str
) -> None:
    worker = make_worker(model, backend, dtype=dtype)
    worker.load()
    by_tokens = run(worker, request(PROMPT))[0]
    for runs in ([(0, 25)], [(3, 5), (10, 1), (20, 7)]):
        places = [place for first, count in runs for place in range(first, first + count)]
        data = embedding_rows(model, [PROMPT[place] for place in places], dtype)
        token_ids = [0 if place in places else token for place, token in enumerate(PROMPT)]
        mixed = replace(request(token_ids, first_block=10), embeds=PlacedRows(tuple(runs), data))
        assert run(worker, mixed, request(PROMPT[:5], first_block=20))[0] == by_tokens


def embedding_rows(model: Path, token_ids: list[int], dtype: str) -> bytes:
    rows = load_file(model / "model.safetensors")["model.embed_tokens.weight"][token_ids]
    return rows.to(getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: [request(PROMPT[:1], first_block=i) for i in range(5)], "5 requests"),
        (lambda: [request(PROMPT * 7)], "280 tokens"),
        (
            lambda: [
                request(PROMPT[:1], first_block=i, adapter=AdapterRef(str(i), bytes([i])))
                for i in range(3)
            ],
            "3 adapters",
        ),
    ],
)
def test_a_step_beyond_the_limits_is_the_schedulers_fault(
    worker: Worker, make: Callable[[], list[ScheduledRequest]], told: str
) -> None:
    with pytest.raises(AssertionError, match=told):
        run(worker, *make())


# ── adapters ────────────────────────────────────────────────────────────────────────────────────


def load(worker: Worker, directory: Path, seed: int) -> AdapterRef:
    """Save an adapter, let the worker prepare it in another thread, and activate it."""
    spec = load_spec(directory.parent / "model")
    checkpoint = read_saved(make_peft("qwen2", seed), directory, spec)
    thread = threading.Thread(target=worker.prepare_adapter, args=(checkpoint,))
    thread.start()
    thread.join()
    worker.submit(SchedulerOutput(0, (), add_adapters=(checkpoint.digest,)))
    worker.collect()
    return AdapterRef(f"adapter-{seed}", checkpoint.digest)


def test_an_adapter_answers_from_its_step_on_and_is_gone_after_its_last(
    worker: Worker, model: Path
) -> None:
    base = run(worker, request(PROMPT))[0]
    adapter = load(worker, model.parent / "1", seed=1)
    assert run(worker, request(PROMPT, adapter=adapter))[0].logprobs != base.logprobs
    worker.submit(SchedulerOutput(1, (), drop_adapters=(adapter.digest,)))
    worker.collect()
    with pytest.raises(KeyError):
        run(worker, request(PROMPT, adapter=adapter))
    assert run(worker, request(PROMPT))[0] == base


@BACKENDS
def test_an_adapter_that_starts_in_mid_prompt_is_the_base_model_before(
    model: Path, backend: str
) -> None:
    """The base model computed the rows before, and the adapter those behind."""
    worker = make_worker(model, backend)
    worker.load()
    adapter = load(worker, model.parent / "1", seed=1)
    run(worker, request(PROMPT[:21], samples=False))
    by_parts = run(worker, request(PROMPT, start=21, adapter=adapter))[0]
    at_once = replace(request(PROMPT, first_block=8, adapter=adapter), adapter_start=21)
    others = [request(PROMPT[:5], first_block=20, adapter=adapter), request(PROMPT, first_block=30)]
    assert run(worker, others[0], at_once, others[1])[1] == by_parts
    for start, end in ((0, 13), (13, 30), (30, 40)):  # one chunk before, one across, one behind
        chunk = request(PROMPT[:end], start, first_block=8, adapter=adapter, samples=end == 40)
        (in_chunks,) = run(worker, replace(chunk, adapter_start=21))
    assert in_chunks == by_parts
    assert by_parts not in run(worker, request(PROMPT, adapter=adapter), others[1])


# ── pooling ─────────────────────────────────────────────────────────────────────────────────────


@BACKENDS
def test_pooled_rows_are_the_hidden_states_that_logits_are_made_of(
    model: Path, backend: str
) -> None:
    worker = make_worker(model, backend, dtype="bfloat16")
    worker.load()
    pooling = replace(request(PROMPT, samples=False), asked=AskedOutputs(num_pooled=3))
    alone = run(worker, pooling)[0]
    assert (alone.token_ids, alone.logprobs) == ((), ())
    hidden = torch.frombuffer(bytearray(alone.pooled), dtype=torch.float32).view(3, 64)
    logits = worker._runner._model.logits(hidden[2:].bfloat16())
    (sampled,) = run(worker, request(PROMPT))[0].logprobs
    assert [sampled] == token_logprobs(logits, [sampled.token_id], VOCAB_SIZE)
    last = replace(pooling, asked=AskedOutputs(num_pooled=1))
    mixed = run(worker, request(PROMPT[:9], first_block=20), last)
    assert mixed[0].pooled == b""
    assert mixed[1].pooled == alone.pooled[-4 * 64 :]
    run(worker, request(PROMPT[:30], first_block=8, samples=False))
    rest = replace(request(PROMPT, 30, first_block=8), asked=AskedOutputs(num_pooled=3))
    assert run(worker, rest)[0].pooled == alone.pooled


@BACKENDS
def test_the_sums_of_chunks_are_added_to_those_of_the_whole_prompt(
    model: Path, backend: str
) -> None:
    worker = make_worker(model, backend, dtype="bfloat16")
    worker.load()
    summing = AskedOutputs(sums_hidden=True)

    def sums(start: int, end: int, *others: ScheduledRequest) -> bytes:
        chunk = request(PROMPT[:end], start, first_block=8, samples=False)
        return run(worker, replace(chunk, asked=summing), *others)[0].hidden_sums

    pooling = replace(request(PROMPT, samples=False), asked=AskedOutputs(num_pooled=len(PROMPT)))
    hidden = torch.frombuffer(bytearray(run(worker, pooling)[0].pooled), dtype=torch.float32)
    expected = summed_rows(hidden.view(len(PROMPT), 64)).wait().numpy().tobytes()
    assert sums(0, 40) == expected
    others = request(PROMPT[:9], first_block=20), request(PROMPT[:7], first_block=30, samples=False)
    parts = [sums(0, 11, *others), sums(11, 12), sums(12, 40, *others)]
    assert sums_added(sums_added(*parts[:2]), parts[2]) == expected


def test_what_was_pooled_stays_when_the_next_step_is_submitted(model: Path) -> None:
    """Recorded steps write their hidden states where those of the step before stood."""
    worker = make_worker(model, "cpu" if "cpu" in available_ops() else "reference")
    worker.load()
    for token_id in (1, 2):
        chunk = replace(request([*PROMPT[:9], token_id], 9), asked=AskedOutputs(num_pooled=1))
        worker.submit(SchedulerOutput(token_id, (request(PROMPT[:9]),)))
        worker.submit(SchedulerOutput(token_id, (chunk,)))
    pooled = [worker.collect().requests[0].pooled for _ in range(4)]
    assert pooled[1] != pooled[3]
    (again,) = run(worker, replace(request([*PROMPT[:9], 1], 9), asked=AskedOutputs(num_pooled=1)))
    assert again.pooled == pooled[1]


# ── greedy tokens ───────────────────────────────────────────────────────────────────────────────


def test_a_plain_greedy_step_takes_what_is_found_without_all_logits(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Decoder, "screened_argmax", staticmethod(lambda hidden, _: [7] * len(hidden))
    )
    worker = make_worker(model)
    worker.load()
    plain = replace(
        request(PROMPT), asked=sampling(SampleInput(SamplingParams(temperature=0.0), 0, 40))
    )
    assert run(worker, plain)[0].token_ids == (7,)
    told = run(worker, plain, request(PROMPT, first_block=8))
    assert told[0].token_ids == told[1].token_ids != (7,)
