from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from lora_serve.config import LoRAConfig
from lora_serve.engine.frontend import resolver as resolver_module
from lora_serve.engine.frontend.resolver import AdapterResolver, sources_of
from lora_serve.errors import (
    AdapterError,
    AdapterExistsError,
    AdapterFormatError,
    AdapterNotFoundError,
    AdapterUnavailableError,
    ConfigError,
)


def config(*places: str, **settings: object) -> LoRAConfig:
    return LoRAConfig(enable_lora=True, lora_resolver=places, **settings)


class Places:
    """What lies where: an error to raise, or nothing to load it."""

    def __init__(self, **found: Exception | None) -> None:
        self.found = {f"/adapters/{name}": error for name, error in found.items()}
        self.asked: list[tuple[str, str]] = []
        self.now = 0.0

    async def load(self, name: str, source: str) -> None:
        self.asked.append((name, source))
        await asyncio.sleep(0)
        if source not in self.found:
            raise AdapterNotFoundError(f"No adapter found for {source}")
        if (error := self.found[source]) is not None:
            raise error

    def resolver(self, *places: str) -> AdapterResolver:
        return AdapterResolver(config(*places or ("dir:/adapters",)), self.load, lambda: self.now)


def test_a_name_is_looked_for_in_each_place_in_their_order() -> None:
    given = config("s3://bucket/tenants/", "hf", "dir:/adapters", lora_allow_hub=True)
    assert sources_of("org/a", given) == ["s3://bucket/tenants/org/a", "org/a", "/adapters/org/a"]
    assert sources_of("a", given) == ["s3://bucket/tenants/a", "/adapters/a"]


@pytest.mark.parametrize(
    "name",
    [
        *("..", "../etc", "a/../../etc", "/etc", "a//b", "a/.", "~", "~root/x", "a\\..\\b"),
        *("a\0b", "a\n", "x" * 257, ""),
    ],
)
def test_no_name_leads_out_of_its_place(name: str) -> None:
    assert sources_of(name, config("dir:/adapters", "s3://bucket/a")) == []


async def test_what_is_found_is_loaded_once_for_all_who_ask() -> None:
    places = Places(a=None)
    resolver = places.resolver()
    assert await asyncio.gather(*(resolver.resolve("a") for _ in range(20))) == [True] * 20
    assert places.asked == [("a", "/adapters/a")]


async def test_what_is_nowhere_is_not_looked_for_again_for_a_while() -> None:
    places = Places()
    resolver = places.resolver()
    assert [await resolver.resolve("a") for _ in range(3)] == [False] * 3
    assert len(places.asked) == 1
    places.now += resolver_module.REMEMBERED_SECONDS
    places.found["/adapters/a"] = None
    assert await resolver.resolve("a")


async def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver_module, "MAX_REMEMBERED", 10)
    places = Places()
    resolver = places.resolver()
    for number in range(50):
        assert not await resolver.resolve(f"n{number}")
    assert len(resolver._remembered) == 10
    assert not await resolver.resolve("n49")
    assert len(places.asked) == 50


async def test_a_broken_adapter_is_refused_without_its_path_and_not_read_each_time() -> None:
    places = Places(a=AdapterFormatError("/adapters/a", ["rank 1024 is above 64"]))
    resolver = places.resolver()
    for _ in range(3):
        with pytest.raises(AdapterError, match="the server's log says why") as caught:
            await resolver.resolve("a")
        assert "/adapters" not in str(caught.value)
    assert len(places.asked) == 1


async def test_a_place_that_does_not_answer_is_worth_another_try() -> None:
    places = Places(a=AdapterUnavailableError("not read within 120 s"))
    with pytest.raises(AdapterUnavailableError, match="try again later"):
        await places.resolver().resolve("a")


async def test_an_adapter_that_was_loaded_meanwhile_is_there() -> None:
    assert await Places(a=AdapterExistsError("loaded already")).resolver().resolve("a")


async def test_a_lookup_goes_on_when_the_first_who_asked_leaves() -> None:
    places = Places(a=None)
    resolver = places.resolver()
    first = asyncio.create_task(resolver.resolve("a"))
    await asyncio.sleep(0)
    second = asyncio.create_task(resolver.resolve("a"))
    await asyncio.sleep(0)
    first.cancel()
    assert await second
    assert len(places.asked) == 1


async def test_only_so_many_names_are_looked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver_module, "MAX_LOOKUPS", 3)
    resolver = Places().resolver()
    found = await asyncio.gather(
        *(resolver.resolve(f"n{number}") for number in range(5)), return_exceptions=True
    )
    assert found[:3] == [False] * 3
    assert [type(error) for error in found[3:]] == [AdapterUnavailableError] * 2


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("hf", "needs --lora-allow-hub"),
        ("/adapters", "must be dir:PATH, hf or s3://BUCKET/PREFIX"),
        ("s3://", "must be dir:PATH"),
        ("dir:", "names no directory"),
        ("", "must be dir:PATH"),
    ],
)
def test_a_place_that_is_none_is_refused(place: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        config(place)


def test_a_resolver_without_adapters_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs --enable-lora"):
        LoRAConfig(lora_resolver=(f"dir:{tmp_path}",))
