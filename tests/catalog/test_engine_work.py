"""What an engine cannot have is tried again, once for each name, and the log and callers are told.

Nothing here waits for a clock: the retries' delays are none, or longer than a test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from lora_serve.catalog import engine_work
from lora_serve.catalog.engine_work import EngineWork
from lora_serve.catalog.records import Change, Member, Record, Snapshot
from lora_serve.catalog.view import CatalogView
from lora_serve.errors import (
    AdapterFormatError,
    AdapterNotFoundError,
    AdapterUnavailableError,
    LoraServeError,
)
from lora_serve.messages import AdapterInfo

MEMBER = Member(replica_id="one", address="http://one", incarnation="1")
PATIENCE = 20
HOUR = 3600.0


class FailingEngine:
    """Has no adapter and loads none: `error` says why."""

    def __init__(self, error: LoraServeError) -> None:
        self.error = error
        self.num_loads = 0

    async def load_lora_adapter(
        self, name: str, path: str, *options: Any, **named: Any
    ) -> AdapterInfo:
        self.num_loads += 1
        raise self.error

    async def unload_lora_adapter(self, name: str) -> None:
        raise AdapterNotFoundError(f"there is no {name}")

    async def reset_prefix_cache(self, lora_name: str, generation: int = 0) -> None:
        pass


def record(serial: int) -> Record:
    return Record(name="a", serial=serial, digest="ab" * 32, source="/srv/a")


def begun(engine: FailingEngine) -> tuple[CatalogView, EngineWork]:
    """Work on one name, which the catalog has since serial 1."""
    view = CatalogView(MEMBER)
    work = EngineWork(
        view, engine, lambda record, before: None, lambda name: None, lambda name: None
    )
    view.take_snapshot(Snapshot(serial=1, records=(record(1),), members=(MEMBER,)))
    work.more()
    return view, work


async def until(is_true: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not is_true():
            await asyncio.sleep(0)


async def fail(view: CatalogView, work: EngineWork, serial: int) -> None:
    """Let the catalog change the name, and wait until the engine has failed to have it."""
    view.take_change(Change(serial=serial, previous=serial - 1, record=record(serial)))
    work.more()
    await until(lambda: "a" in view.failed and view.failed["a"].serial == serial)


async def test_a_name_is_tried_again_however_often_it_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_work, "MAX_RETRY_SECONDS", 0.0)
    engine = FailingEngine(AdapterUnavailableError("S3 is away"))
    _, work = begun(engine)
    await until(lambda: engine.num_loads > 1100)  # floats end at 2^1024
    await work.close()


async def test_a_name_has_one_timer_whatever_changes_and_none_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_work, "RETRY_SECONDS", HOUR)
    monkeypatch.setattr(engine_work, "MAX_RETRY_SECONDS", HOUR)
    loop, timers = asyncio.get_running_loop(), []
    set_timer = loop.call_later

    def noted(delay: float, *call: Any) -> asyncio.TimerHandle:
        timers.append(set_timer(delay, *call))
        return timers[-1]

    monkeypatch.setattr(loop, "call_later", noted)
    view, work = begun(FailingEngine(AdapterUnavailableError("S3 is away")))
    await until(lambda: view.failed)
    for serial in range(2, 12):
        await fail(view, work, serial)
    assert [timer.cancelled() for timer in timers] == [True] * 10 + [False]
    await work.close()
    assert timers[-1].cancelled()


async def test_a_change_of_a_failing_name_begins_with_short_delays_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, delays = asyncio.get_running_loop(), []
    set_timer = loop.call_later

    def noted(delay: float, *call: Any) -> asyncio.TimerHandle:
        delays.append(delay)
        return set_timer(0.0 if len(delays) < 4 else HOUR, *call)

    monkeypatch.setattr(loop, "call_later", noted)
    view, work = begun(FailingEngine(AdapterUnavailableError("S3 is away")))
    await until(lambda: len(delays) == 4)
    await fail(view, work, 2)
    assert delays == [1.0, 2.0, 4.0, 8.0, 1.0]
    await work.close()


async def test_the_log_has_each_reason_and_each_serial_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_work, "MAX_RETRY_SECONDS", 0.0)
    engine = FailingEngine(AdapterUnavailableError("S3 is away"))
    view, work = begun(engine)
    await until(lambda: engine.num_loads > 3)
    engine.error = AdapterUnavailableError("the disk is full")
    await until(lambda: engine.num_loads > 7)
    await fail(view, work, 2)
    told = [line.message.partition("(")[2] for line in caplog.records]
    assert told == [
        "serial 1) takes no requests here: S3 is away",
        "serial 1) takes no requests here: the disk is full",
        "serial 2) takes no requests here: the disk is full",
    ]
    await work.close()


async def test_callers_are_told_no_words_of_an_adapters_files_and_admins_are() -> None:
    finding = "layer_replication: is 'tenant secret', must be null"
    view, work = begun(FailingEngine(AdapterFormatError("/-data/a", [finding])))
    await until(lambda: view.failed)
    failure = view.failed["a"]
    assert finding in failure.reason
    assert failure.told == "its copy of the adapter cannot be served, and its log says why"
    await work.close()
