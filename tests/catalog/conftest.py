"""A store of each kind, empty."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_serve.catalog import file_store, redis_scripts, view
from lora_serve.catalog.base import CatalogStore
from lora_serve.catalog.file_store import FileStore
from lora_serve.catalog.records import MAX_UNLOADED, Snapshot
from lora_serve.catalog.redis_store import RedisStore
from tests.fakes.catalog_store import MemoryStore
from tests.fakes.redis_server import RedisServer, running_redis


@pytest.fixture(scope="package")
def catalog_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(tmp_path_factory) as server:
        yield server


@pytest.fixture(params=["file", "redis", "memory"])
def stores(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[CatalogStore]]:
    """Two clients of one catalog."""
    made: list[CatalogStore]
    if request.param == "file":
        made = [FileStore(tmp_path / "catalog") for _ in range(2)]
    elif request.param == "memory":
        memory = MemoryStore()
        made = [memory, memory]
    else:
        server = request.getfixturevalue("catalog_redis")
        with server.client() as client:
            client.flushall()
        made = [RedisStore(server.url, "tests") for _ in range(2)]
    for store in made:
        store.restore(Snapshot())
    yield made
    for store in made:
        store.close()


@pytest.fixture
def two_unloaded_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores and views forget an unloaded name when there are three."""
    put, bound = redis_scripts.PUT, f"unloaded) > {MAX_UNLOADED}"
    assert bound in put
    monkeypatch.setattr(redis_scripts, "PUT", put.replace(bound, "unloaded) > 2"))
    for module in (file_store, view):
        monkeypatch.setattr(module, "MAX_UNLOADED", 2)
    monkeypatch.setattr(MemoryStore, "max_unloaded", 2)


@pytest.fixture
def store(stores: list[CatalogStore]) -> CatalogStore:
    return stores[0]
