"""The engine in a process of its own, on a real tiny model."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from lora_serve.config import EngineConfig
from lora_serve.engine.frontend import starting
from lora_serve.engine.frontend.admission import RequestGroup
from lora_serve.engine.frontend.async_engine import AsyncEngine
from lora_serve.engine.frontend.client import EngineClient
from lora_serve.engine.settings import engine_config
from lora_serve.errors import (
    AdapterChangedError,
    AdapterError,
    AdapterNotFoundError,
    ConfigError,
    EngineDeadError,
    LoraServeError,
)
from lora_serve.generate_request import GenerateRequest
from lora_serve.identity import BASE_MODEL, NoAdapter
from lora_serve.messages import AdapterInfo, EngineReady
from lora_serve.outputs import OutputDelta, RequestOutput
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams

PROMPT = TokensPrompt(tuple(i % 90 for i in range(50)))
LONG = SamplingParams(max_tokens=900, temperature=0, ignore_eos=True)
LONG_REQUEST = GenerateRequest(request_id="long", prompt=PROMPT, params=LONG)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_engine(model_path: Path, adapter_paths: list[Path]) -> AsyncIterator[AsyncEngine]:
    """Every engine takes seconds to start."""
    config = engine_config(
        model=str(model_path),
        enable_lora=True,
        lora_modules=(f"a={adapter_paths[0]}",),
        num_gpu_blocks_override=200,
    )
    engine = await AsyncEngine.start(config)
    yield engine
    await engine.shutdown()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared_engine: AsyncEngine, adapter_paths: list[Path]) -> AsyncEngine:
    """It has the adapter "a", and no other."""
    for info in await shared_engine.list_adapters():
        if info.name != "a":
            await shared_engine.unload_lora_adapter(info.name)
    await shared_engine.load_lora_adapter("a", str(adapter_paths[0]), load_inplace=True)
    return shared_engine


async def collect(
    engine: AsyncEngine,
    params: SamplingParams,
    name: str | NoAdapter = BASE_MODEL,
    request_id: str = "r",
    *,
    is_streamed: bool = True,
) -> RequestOutput:
    output = RequestOutput(request_id, list(PROMPT.token_ids), params.n)
    request = GenerateRequest(
        request_id=request_id,
        prompt=PROMPT,
        params=params,
        lora_name=name,
        is_streamed=is_streamed,
    )
    async for delta in engine.generate(request):
        output.add(delta)
    return output


async def test_requests_adapters_and_errors_cross_the_process_boundary(
    engine: AsyncEngine, adapter_paths: list[Path]
) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=2, ignore_eos=True)
    base, adapted = await asyncio.gather(
        collect(engine, params, request_id="one"), collect(engine, params, "a", "two")
    )
    assert base.outputs[0].token_ids != adapted.outputs[0].token_ids
    assert len(base.outputs[0].logprobs) == 8
    assert adapted.adapter is not None
    with pytest.raises(AdapterNotFoundError, match="nobody"):
        await collect(engine, params, "nobody")
    with pytest.raises(AdapterError, match="load_inplace"):
        await engine.load_lora_adapter("a", str(adapter_paths[1]))
    info = await engine.load_lora_adapter("a", str(adapter_paths[1]), load_inplace=True)
    assert [entry.digest for entry in await engine.list_adapters()] == [info.digest]
    again = await collect(engine, params, "a")
    assert again.outputs[0].token_ids != adapted.outputs[0].token_ids
    await engine.reset_prefix_cache("a")
    assert (await engine.list_adapters())[0].generation == 1
    await engine.unload_lora_adapter("a")
    with pytest.raises(AdapterNotFoundError):
        await collect(engine, params, "a")


async def test_what_a_caller_that_left_did_not_take_is_told(engine: AsyncEngine) -> None:
    """An answer that is told at its end waits here until then, so its caller knows nothing."""
    request = msgspec.structs.replace(LONG_REQUEST, is_streamed=False)
    group = RequestGroup(1, len(PROMPT.token_ids))
    asking = asyncio.create_task(anext(engine.generate(request, group)))
    async with asyncio.timeout(60):
        while not (running := (await engine.list_requests(lambda _: True, 1))[0]):
            await asyncio.sleep(0.01)
        while not running[0].num_output_tokens:
            (running, _) = await engine.list_requests(lambda _: True, 1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert {request_id for request_id, _ in group.unread} == {"long"}
    assert sum(len(delta.token_ids) for _, delta in group.unread) >= 1


async def test_a_running_answer_keeps_its_version_while_its_adapter_is_replaced(
    engine: AsyncEngine, adapter_paths: list[Path]
) -> None:
    params = SamplingParams(max_tokens=120, temperature=0, ignore_eos=True)
    undisturbed = await collect(engine, params, "a")
    running = asyncio.create_task(collect(engine, params, "a"))
    await asyncio.sleep(0.05)
    await engine.load_lora_adapter("a", str(adapter_paths[2]), load_inplace=True)
    replaced = await collect(engine, params, "a", "after")
    assert (await running).outputs[0].token_ids == undisturbed.outputs[0].token_ids
    assert replaced.outputs[0].token_ids != undisturbed.outputs[0].token_ids


async def test_a_caller_that_leaves_frees_its_blocks(engine: AsyncEngine) -> None:
    deltas = engine.generate(LONG_REQUEST)
    await anext(deltas)
    assert (await engine.get_stats()).num_running == 1
    await deltas.aclose()
    stats = await engine.get_stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)


async def test_requests_are_listed_newest_first_with_how_far_they_have_come(
    engine: AsyncEngine,
) -> None:
    streams = []
    for name in ("old", "new"):
        params = msgspec.structs.replace(LONG, n=2)
        request = msgspec.structs.replace(LONG_REQUEST, request_id=name, params=params)
        streams.append(engine.generate(request))
        await anext(streams[-1])
    (newest,), number = await engine.list_requests(lambda _: True, 1)
    assert number == 2
    assert newest.request.request_id == "new"
    assert newest.is_running
    assert newest.num_output_tokens >= 1
    assert newest.num_computed_tokens >= len(PROMPT.token_ids)
    ((old,), number) = await engine.list_requests(lambda asked: asked.request_id == "old", 10)
    assert (old.request.request_id, number) == ("old", 1)
    for stream in streams:
        await stream.aclose()
    assert await engine.list_requests(lambda _: True, 10) == ([], 0)


async def test_a_stop_string_ends_the_answer_in_the_engine_too(engine: AsyncEngine) -> None:
    free = await collect(engine, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    text = free.outputs[0].text
    stop = text[10:13]
    stopped = await collect(
        engine, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, stop=(stop,))
    )
    assert stopped.outputs[0].text == text[: text.index(stop)]
    assert (stopped.outputs[0].finish_reason, stopped.outputs[0].stop_reason) == ("stop", stop)
    assert (await engine.get_stats()).num_running == 0


async def test_a_killed_engine_is_replaced_and_only_callers_that_have_begun_to_get_an_answer_see_it(
    engine: AsyncEngine, adapter_paths: list[Path], tmp_path: Path
) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(adapter_paths[1], changed)
    await engine.load_lora_adapter("changed", str(changed))
    await engine.load_lora_adapter("b", str(adapter_paths[2]), pinned=True)
    await engine.reset_prefix_cache("b")
    before = await engine.list_adapters()
    params = SamplingParams(max_tokens=200, temperature=1, seed=5, ignore_eos=True, logprobs=1)
    undisturbed = await collect(engine, params, "b")
    stream = engine.generate(LONG_REQUEST)
    await anext(stream)
    whole = asyncio.create_task(collect(engine, params, "b", is_streamed=False))
    await asyncio.sleep(0.1)
    shutil.rmtree(changed)
    shutil.copytree(adapter_paths[0], changed)
    pid = engine.engine_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="signal 9"):
        await asyncio.wait_for(drain(stream), timeout=10)
    with pytest.raises(EngineDeadError, match="started again"):
        engine.check_health()
    again = await asyncio.wait_for(whole, timeout=60)
    assert again.outputs == undisturbed.outputs
    assert again.adapter == undisturbed.adapter
    async with asyncio.timeout(60):  # the answer may have been whole before the kill
        while not engine.is_alive:
            await asyncio.sleep(0.01)
    engine.check_health()
    assert engine.engine_pid != pid
    with pytest.raises(AdapterChangedError, match="changed"):
        await collect(engine, params, "changed")
    after = await engine.list_adapters()
    assert [version(info) for info in after] == [version(info) for info in before]
    assert (await engine.load_lora_adapter("changed", str(changed), load_inplace=True)).digest


async def drain(stream: AsyncIterator[OutputDelta]) -> list[OutputDelta]:
    return [delta async for delta in stream]


def version(info: AdapterInfo) -> tuple[object, ...]:
    return info.name, info.path, info.digest, info.generation, info.pinned


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"model": "/nowhere/at/all"}, ConfigError),
        ({"max_model_len": 10**6}, ConfigError),
        ({"enable_lora": True, "lora_modules": ("a=/nowhere",)}, AdapterNotFoundError),
    ],
)
async def test_what_cannot_be_served_is_told_at_start(
    model_path: Path, settings: dict[str, object], error: type[LoraServeError]
) -> None:
    with pytest.raises(error):
        await AsyncEngine.start(engine_config(**{"model": str(model_path), **settings}))


async def test_a_start_that_is_given_up_leaves_no_process_behind(model_path: Path) -> None:
    before = pids_of_children()
    start = asyncio.create_task(AsyncEngine.start(engine_config(model=str(model_path))))
    async with asyncio.timeout(20):
        while pids_of_children() == before:
            await asyncio.sleep(0.01)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
    assert pids_of_children() == before


def pids_of_children() -> set[int | None]:
    return {child.pid for child in multiprocessing.active_children()}


async def test_a_tokenizer_that_is_refused_ends_a_start_whose_model_is_still_being_read(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.json").write_text("{ nope")
    closed = asyncio.Event()

    class Reading(EngineClient):
        async def start(self, config: EngineConfig) -> EngineReady:
            await asyncio.Event().wait()
            raise AssertionError("never read to its end")

        async def close(self) -> None:
            await super().close()
            closed.set()

    monkeypatch.setattr(starting, "EngineClient", Reading)
    config = engine_config(model=str(model_path), tokenizer=str(tmp_path))
    async with asyncio.timeout(60):
        with pytest.raises(ConfigError, match="cannot load a tokenizer"):
            await AsyncEngine.start(config)
    assert closed.is_set()
