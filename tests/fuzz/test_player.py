from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from lora_serve.bench.http_stream import Origin
from lora_serve.fuzz.answers import Called, Heard
from lora_serve.fuzz.client import FuzzClient
from lora_serve.fuzz.player import Player, ServerUnderTest
from lora_serve.fuzz.trace import (
    Abort,
    Ask,
    Event,
    Load,
    PauseAndResume,
    Reset,
    Tokens,
    Trace,
    Unload,
)
from lora_serve.sampling_params import SamplingParams


class SlowCalls(FuzzClient):
    """Answers each call of an operator after a moment."""

    async def call(self, path: str, body: Mapping[str, object]) -> Called:
        begin = time.monotonic()
        await asyncio.sleep(0.02)
        return Called(begin, time.monotonic())


@pytest.mark.parametrize(
    ("later", "waits"),
    [
        (Unload(lora_name="red"), True),
        (Reset(lora_name="red"), True),
        (Reset(lora_name="blue"), False),
        (Reset(), False),
    ],
)
async def test_single_calls_of_one_name_are_sent_one_after_another(
    tmp_path: Path, later: Event, waits: bool
) -> None:
    server = ServerUnderTest(
        client=SlowCalls(Origin.parse("http://localhost")),
        base_model="base",
        hidden_size=8,
        versions=[tmp_path],
        workspace=tmp_path,
    )
    trace = Trace(seed=0, events=(Load(lora_name="red", version=0), later))
    first, second = await Player(server).play(trace)
    assert isinstance(first, Called)
    assert isinstance(second, Called)
    assert (second.begin >= first.end) is waits


class StartingAgain(FuzzClient):
    """A server whose engine was killed: it takes a pause, and cannot resume at first."""

    def __init__(self) -> None:
        super().__init__(Origin.parse("http://localhost"))
        self.called: list[str] = []

    async def call(self, path: str, body: Mapping[str, object]) -> Called:
        now = time.monotonic()
        self.called.append(path)
        return Called(now, now, 503 if len(self.called) == 2 else 200)


async def test_a_pause_ends_though_the_engine_died_in_it(tmp_path: Path) -> None:
    client = StartingAgain()
    server = ServerUnderTest(
        client=client, base_model="base", hidden_size=8, versions=[tmp_path], workspace=tmp_path
    )
    (paused,) = await Player(server).play(Trace(seed=0, events=(PauseAndResume(mode="wait"),)))
    assert isinstance(paused, Called)
    assert client.called == ["/pause?mode=wait", "/resume", "/resume"]
    assert paused.is_done


class NotesIds(FuzzClient):
    """Answers everything, and notes by which ids requests are known and aborted."""

    def __init__(self) -> None:
        super().__init__(Origin.parse("http://localhost"))
        self.asked: list[str] = []
        self.aborted: list[object] = []

    async def ask(self, path: str, body: Mapping[str, object], **how: object) -> Heard:
        self.asked.append(str(how["request_id"]))
        return Heard(time.monotonic(), is_whole=True)

    async def call(self, path: str, body: Mapping[str, object]) -> Called:
        self.aborted.append((path, body.get("request_ids", "all")))
        return Called(time.monotonic(), time.monotonic())


async def test_calls_abort_the_newest_requests_by_the_ids_that_these_were_sent_with(
    tmp_path: Path,
) -> None:
    client = NotesIds()
    server = ServerUnderTest(
        client=client,
        base_model="base",
        hidden_size=8,
        versions=[tmp_path],
        workspace=tmp_path,
        prefix="x-",
    )
    ask = Ask(prompt=Tokens((1, 2)), params=SamplingParams())
    events = (ask, Abort(newest=2), ask, Reset(), ask, Abort(newest=2), Abort())
    await Player(server).play(Trace(seed=0, events=events))
    first, second, third = client.asked
    assert len({first, second, third}) == 3
    assert all(name.startswith("x-") for name in client.asked), "others of a server have the same"
    aborted = [ids for path, ids in client.aborted if path == "/abort_requests"]
    assert aborted == [[first], [second, third], "all"]
