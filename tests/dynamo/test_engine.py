"""The engine as Dynamo's worker drives it, with Dynamo's own classes and a fake engine below."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "dynamo.common.backend", reason="*** NO DYNAMO TESTED: pip install 'lora-serve[dynamo]' ***"
)

from dynamo._core import Context
from dynamo.common.backend import LLMEngine
from dynamo.common.backend.publisher import ZmqSource
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument

from lora_serve.config import EngineConfig, KVEventsConfig
from lora_serve.dynamo import engine as module
from lora_serve.dynamo.engine import DynamoEngine
from lora_serve.engine.frontend.async_engine import AsyncEngine
from lora_serve.errors import ConfigError
from tests.fakes.engine import MODEL, FakeEngine, fake_config, write_adapter


class Fleet:
    """What frontends would know: who is published."""

    def __init__(self) -> None:
        self.names: list[str] = []

    async def register(self, **card: Any) -> None:
        self.names.append(card["lora_name"])
        assert card["runtime_config"].context_length == 512

    async def unregister(self, *, endpoint: object, lora_name: str) -> None:
        self.names.remove(lora_name)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    fleet = Fleet()
    monkeypatch.setattr(module, "register_model", fleet.register)
    monkeypatch.setattr(module, "unregister_model", fleet.unregister)
    return fleet


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch, fleet: Fleet) -> DynamoEngine:
    async def start(config: EngineConfig) -> FakeEngine:
        return FakeEngine(config)

    monkeypatch.setattr(AsyncEngine, "start", start)
    made = DynamoEngine(fake_config())
    await made.start(7)
    await made.on_endpoint_ready(object())
    return made


async def tokens(engine: DynamoEngine, **request: object) -> list[int]:
    found: list[int] = []
    async for chunk in engine.generate({"token_ids": [104, 105], **request}, Context("id")):
        found += chunk["token_ids"]
    return found


async def test_it_is_an_engine_that_tells_what_the_router_needs(engine: DynamoEngine) -> None:
    assert isinstance(engine, LLMEngine)
    registered = (await engine.start(7)).llm
    assert registered is not None
    assert registered.kv_cache_block_size == 16
    assert registered.context_length == 512
    assert registered.total_kv_blocks == 64


async def test_adapters_are_loaded_replaced_and_unloaded_while_it_runs(
    engine: DynamoEngine, fleet: Fleet, tmp_path: Path
) -> None:
    async def load(weights: str) -> dict[str, Any]:
        uri = f"file://{write_adapter(tmp_path / weights, weights)}"
        return await engine.engine_update(
            "load_lora", {"lora_name": "tenant", "source": {"uri": uri}}
        )

    base = await tokens(engine, model=MODEL)
    assert (await load("ALPHA"))["status"] == "success"
    first = await tokens(engine, model="tenant")
    assert (await load("BETA"))["status"] == "success"
    assert len({*map(tuple, (base, first, await tokens(engine, model="tenant")))}) == 3
    assert fleet.names == ["tenant"], "frontends hear of a name once"
    assert (await engine.engine_update("list_loras", {}))["count"] == 1
    assert (await engine.engine_update("unload_lora", {"lora_name": "tenant"}))["status"]
    assert fleet.names == []
    with pytest.raises(InvalidArgument, match="tenant"):
        await tokens(engine, model="tenant")


@pytest.mark.parametrize(
    ("update", "body"),
    [
        ("load_lora", {"lora_name": "a", "source": {"uri": "file:///none"}}),
        ("load_lora", {"lora_name": "a"}),
        ("load_lora", {"source": {"uri": "file:///none"}}),
        ("unload_lora", {"lora_name": "nobody"}),
    ],
)
async def test_what_is_wrong_with_an_update_is_told(
    engine: DynamoEngine, fleet: Fleet, update: str, body: dict[str, Any]
) -> None:
    told = await engine.engine_update(update, body)
    assert told["status"] == "error"
    assert told["message"]
    assert fleet.names == []


async def test_it_ends_once_and_answers_no_more(engine: DynamoEngine) -> None:
    await engine.cleanup()
    await engine.cleanup()
    with pytest.raises(EngineShutdown):
        await tokens(engine)


async def test_kv_events_are_read_where_they_are_published() -> None:
    assert await DynamoEngine(fake_config()).kv_event_sources() == []
    events = KVEventsConfig(
        kv_events_enable_kv_cache_events=True,
        kv_events_endpoint="tcp://*:5557",
        kv_events_topic="kv",
    )
    (source,) = await DynamoEngine(EngineConfig(kv_events=events)).kv_event_sources()
    assert source == ZmqSource(endpoint="tcp://127.0.0.1:5557", topic="kv")


async def test_a_worker_warns_of_more_threads_than_cores(
    engine: DynamoEngine, caplog: pytest.LogCaptureFixture
) -> None:
    await DynamoEngine(fake_config(cpu_threads=1000)).start(8)
    assert "--cpu-threads 1000: 1000 threads share the " in caplog.text


async def test_flags_are_dynamos_and_those_of_serve() -> None:
    argv = ["m", "--enable-lora", "--namespace", "prod", "--discovery-backend", "file"]
    engine, worker = await DynamoEngine.from_args([*argv, "--max-loras", "3"])
    assert (worker.namespace, worker.component, worker.endpoint) == ("prod", "backend", "generate")
    assert (worker.discovery_backend, worker.model_name) == ("file", "m")
    assert engine.supported_updates() == {"load_lora", "unload_lora", "list_loras"}
    with pytest.raises(ConfigError, match="no model"):
        await DynamoEngine.from_args(["--enable-lora"])
