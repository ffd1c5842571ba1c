from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from lora_serve.catalog import plan
from lora_serve.catalog.changes import MAX_TRIES, CatalogChanges
from lora_serve.catalog.records import MAX_NUMBER, Record
from lora_serve.errors import CatalogUnavailableError
from tests.fakes.catalog_store import MemoryStore

A = Record(name="a", digest="aa", source="/a")


class Refusing(MemoryStore):
    """Takes no change before so many were tried; counts these."""

    def __init__(self, num_refused: int) -> None:
        super().__init__()
        self.num_puts = 0
        self._num_refused = num_refused

    def put(self, record: Record, expected: int) -> Record | None:
        self.num_puts += 1
        return None if self.num_puts <= self._num_refused else super().put(record, expected)


def changes(store: MemoryStore) -> CatalogChanges:
    async def ask(call: Callable[..., Any], *arguments: object) -> Any:
        return call(*arguments)

    return CatalogChanges(store, ask, lambda: None)


async def test_a_store_that_refuses_each_change_is_asked_some_times_with_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, pauses = Refusing(1000), []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    with pytest.raises(CatalogUnavailableError, match=r"20 tries to change 'a'.*nothing was"):
        await changes(store).make("a", plan.loading(A, load_inplace=True))
    assert store.num_puts == len(pauses) == MAX_TRIES
    assert 0.1 < sum(pauses) < 10


async def test_a_change_that_others_came_before_is_made_in_the_end() -> None:
    store = Refusing(5)
    written = await changes(store).make("a", plan.loading(A, load_inplace=True))
    assert store.get("a") == written


async def test_no_reset_raises_a_generation_to_one_that_no_store_would_give_back() -> None:
    store = MemoryStore()
    last = store.put(replace(A, generation=MAX_NUMBER - 2), 0)
    assert last is not None
    reset = await changes(store).make("a", plan.resetting(Record(name="a")))
    assert reset.generation == MAX_NUMBER - 1
    with pytest.raises(CatalogUnavailableError, match="the last there is"):
        await changes(store).make("a", plan.resetting(Record(name="a")))
    assert store.get("a") == reset
