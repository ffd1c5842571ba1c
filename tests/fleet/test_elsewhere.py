"""What one replica cannot answer now, another one does: between two reports, too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from lora_serve.config import CatalogConfig, ServerConfig
from lora_serve.errors import (
    AdapterChangedError,
    AdapterError,
    AdapterUnavailableError,
    CatalogUnavailableError,
    EngineDeadError,
    LoraServeError,
)
from lora_serve.fleet.ingress import ingress_app
from lora_serve.identity import BASE_MODEL, NoAdapter
from lora_serve.server.adapter_names.base import AdapterNames
from lora_serve.server.adapter_names.local import LocalNames
from lora_serve.server.adapter_names.opening import opened_names
from lora_serve.server.admin.protocol import AdapterWish
from tests.fakes.engine import MODEL, FakeEngine, write_adapter
from tests.fakes.fleet import LocalFleet
from tests.fleet.test_replica import PATIENCE_SECONDS, Blind
from tests.server.clients import Json, error_of

ASKED: Json = {"model": "a", "prompt": "Count to three", "max_tokens": 8, "seed": 1}


@asynccontextmanager
async def party(
    engines: list[FakeEngine], names: list[AdapterNames]
) -> AsyncIterator[tuple[LocalFleet, httpx.AsyncClient]]:
    """A fleet whose router was told nothing since its begin, and a client of it."""
    fleet = LocalFleet(engines, ServerConfig(), "round-robin", names)
    await fleet.report()
    fleet.reports_again = False
    app = ingress_app(fleet, engines[0].config, ServerConfig(), has_catalog=True)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield fleet, client


async def test_a_replica_that_has_just_failed_to_load_passes_requests_on(tmp_path: Path) -> None:
    engines = [Blind(), FakeEngine()]
    async with (
        opened(engines[0], tmp_path, "blind") as blind,
        opened(engines[1], tmp_path, "sees") as sees,
        party(engines, [blind, sees]) as (fleet, client),
    ):
        wish = AdapterWish("a", write_adapter(tmp_path / "a", "weights"))
        rollout = (await sees.load(wish, "operator")).rollout
        assert rollout is not None
        assert [one.replica_id for one in rollout.missing] == ["blind"]
        answers = [await client.post("/v1/completions", json=ASKED) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200] * 4
        assert {*fleet.asked} == {"r0", "r1"}, "no report has kept requests away from it"
        fleet.reports_again = True
        fleet.asked.clear()
        for _ in range(4):
            await client.post("/v1/completions", json=ASKED)
        assert {*fleet.asked} == {"r1"}


async def test_a_change_that_every_replica_tells_of_is_listed_once(tmp_path: Path) -> None:
    engines = [FakeEngine(), FakeEngine()]
    async with (
        opened(engines[0], tmp_path, "one") as one,
        opened(engines[1], tmp_path, "two") as two,
        party(engines, [one, two]) as (fleet, client),
    ):
        load = {"lora_name": "a", "lora_path": write_adapter(tmp_path / "a", "weights")}
        for path, body, status in (
            ("/v1/load_lora_adapter", load, 200),
            ("/v1/load_lora_adapter", load, 400),
            ("/v1/unload_lora_adapter", {"lora_name": "a"}, 200),
        ):
            assert (await client.post(path, json=body)).status_code == status
        changes = (await client.get("/adapter_changes")).json()["data"]
    assert {*fleet.asked} == {"r0", "r1"}
    told = [(each["change"], each["error"] is None, each["serial"] is None) for each in changes]
    assert told == [("unload", True, False), ("load", False, True), ("load", True, False)]
    assert not any(" at " in each["by"] for each in changes)


def opened(
    engine: FakeEngine, directory: Path, name: str
) -> AbstractAsyncContextManager[AdapterNames]:
    config = CatalogConfig(lora_catalog=str(directory / "catalog"), lora_replica_id=name)
    return opened_names(engine, ServerConfig(), config)


class Unasked(LocalNames):
    """Names of a replica that its catalog has told nothing."""

    def check_ready(self) -> None:
        raise CatalogUnavailableError("it does not answer")

    async def admit(self, name: str | NoAdapter) -> None:
        if name is not BASE_MODEL:
            self.check_ready()


async def test_a_replica_that_no_catalog_has_told_its_names_gets_requests_for_none_of_them(
    tmp_path: Path,
) -> None:
    engines = [FakeEngine(), FakeEngine()]
    await engines[1].load_lora_adapter("a", write_adapter(tmp_path / "a", "weights"))
    async with party(engines, [Unasked(engines[0]), LocalNames(engines[1])]) as (fleet, client):
        for _ in range(4):
            assert (await client.post("/v1/completions", json=ASKED)).status_code == 200
        assert {*fleet.asked} == {"r1"}  # as its report says
        of_base = ASKED | {"model": MODEL}
        assert (await client.post("/v1/completions", json=of_base)).status_code == 200
        assert {*fleet.asked} == {"r0", "r1"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        AdapterChangedError("its files have changed since it was evicted"),
        AdapterUnavailableError("its disk hangs"),
        EngineDeadError("it has died, and lives again"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_what_one_engine_cannot_do_another_may(
    error: LoraServeError, stream: bool, tmp_path: Path
) -> None:
    engines = [FakeEngine(), FakeEngine()]
    for number, engine in enumerate(engines):
        await engine.load_lora_adapter("a", write_adapter(tmp_path / str(number), "weights"))
    async with party(engines, [*map(LocalNames, engines)]) as (fleet, client):
        engines[0].error = error
        for _ in range(2):
            answer = await client.post("/v1/completions", json=ASKED | {"stream": stream})
            assert answer.status_code == 200
            assert str(error) not in answer.text
        assert {*fleet.asked} == {"r0", "r1"}
        engines[1].error = error
        fleet.asked.clear()
        async with asyncio.timeout(PATIENCE_SECONDS):
            answer = await client.post("/v1/completions", json=ASKED)
        status = 400 if isinstance(error, AdapterChangedError) else 503
        assert str(error) in str(error_of(answer, status)["message"])
        assert len(fleet.asked) == 3, "each once, and one again for the answer"


async def test_a_client_s_mistake_is_told_by_the_first_replica(tmp_path: Path) -> None:
    engines = [FakeEngine(), FakeEngine()]
    async with party(engines, [*map(LocalNames, engines)]) as (fleet, client):
        engines[0].error = engines[1].error = AdapterError("it cannot be used")
        for number, engine in enumerate(engines):
            await engine.load_lora_adapter("a", write_adapter(tmp_path / str(number), "weights"))
        error_of(await client.post("/v1/completions", json=ASKED), 400)
        assert len(fleet.asked) == 1
