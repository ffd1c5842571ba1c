from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from lora_serve.config import CatalogConfig, ServerConfig
from lora_serve.engine.frontend.async_engine import AsyncEngine
from lora_serve.errors import AdapterNotFoundError, EngineDeadError
from lora_serve.fleet.replica import Replica
from lora_serve.server.adapter_names.opening import opened_names
from lora_serve.server.admin.protocol import AdapterWish
from lora_serve.server.app import create_app
from lora_serve.server.http.auth import KeyRing
from tests.fakes.engine import FakeEngine, fake_config, write_adapter

PATIENCE_SECONDS = 60


class Blind(FakeEngine):
    """An engine that no adapter's files can be read by."""

    async def load_lora_adapter(self, name: str, path: str, *_: object, **__: object) -> object:  # type: ignore[override]
        raise AdapterNotFoundError(f"No adapter found for {path}")


async def test_a_replica_reports_the_names_that_it_cannot_have(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:

        async def replica(name: str, engine: FakeEngine) -> Replica:
            config = CatalogConfig(lora_catalog=str(tmp_path / "catalog"), lora_replica_id=name)
            names = await stack.enter_async_context(opened_names(engine, ServerConfig(), config))
            if name == "sees":
                wish = AdapterWish("a", write_adapter(tmp_path / "a", "weights"))
                await names.load(wish, "operator")
            keys = KeyRing(ServerConfig())
            app = create_app(engine, ServerConfig(), keys=keys, names=names)
            return Replica(name, engine, app, names, keys)

        sees, blind = await replica("sees", FakeEngine()), await replica("blind", Blind())
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (await blind.stats())["unable"] != ["a"]:
                await asyncio.sleep(0.02)
        assert (await sees.stats())["unable"] == []


async def test_a_replica_warns_of_more_threads_than_its_own_machine_has_cores(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a cluster of Ray's it may be another machine than that of the settings."""

    async def start(*_: object, **__: object) -> None:
        raise EngineDeadError("nothing more is asked for")

    monkeypatch.setattr(AsyncEngine, "start", start)
    config = fake_config(cpu_threads=1000)
    with pytest.raises(EngineDeadError):
        await Replica.start("one", config, ServerConfig(), CatalogConfig(), lambda *_: False)
    assert "--cpu-threads 1000: 1000 threads share the " in caplog.text
