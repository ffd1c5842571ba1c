from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from lora_serve.config import EngineConfig, ModelConfig
from lora_serve.engine.core.rank_news import RankNews
from lora_serve.engine.frontend import client as client_module
from lora_serve.engine.frontend import engine_process as process_module
from lora_serve.engine.frontend.client import EngineClient, likely_cause
from lora_serve.engine.settings import engine_config
from lora_serve.errors import EngineDeadError, LoraServeError, RankLostError
from lora_serve.messages import EngineReady, Shutdown


async def test_a_closed_client_leaves_no_descriptor_open(tmp_path: Path) -> None:
    clients, num_open = [], []
    for _ in range(2):  # what a process opens once, the first opens
        client = EngineClient()
        clients.append(client)  # what is collected is closed anyhow
        with pytest.raises(LoraServeError):
            await client.start(engine_config(model=str(tmp_path)))
        await client.close()
        num_open.append(len(os.listdir("/proc/self/fd")))
    assert num_open[0] == num_open[1]


async def test_a_closed_client_still_tells_how_its_process_ended(tmp_path: Path) -> None:
    client = EngineClient()
    with pytest.raises(LoraServeError):
        await client.start(engine_config(model=str(tmp_path)))
    await client.close()
    await client.close()
    assert client.pid is None
    assert not client.is_alive
    with pytest.raises(EngineDeadError, match="engine process"):
        await client.send(None)  # type: ignore[arg-type]


async def sending_client() -> tuple[EngineClient, asyncio.Task[None]]:
    """A client with a message that nobody takes, as its process has just been killed."""
    client = EngineClient(process=Mock(pid=1, exit_code=-signal.SIGKILL))
    sending = asyncio.create_task(client.send(Shutdown()))
    await asyncio.sleep(0)
    assert not sending.done()
    client._has_died = True
    return client, sending


async def test_who_sends_to_a_process_that_has_just_died_is_told_so() -> None:
    client, sending = await sending_client()
    await client.close()
    with pytest.raises(EngineDeadError, match="signal 9"):
        await sending


async def test_a_client_is_closed_whose_process_has_died_unnoticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "SHUTDOWN_SECONDS", 0.01)
    with socket.socket() as sentinel:
        client = EngineClient(process=Mock(pid=1, sentinel=sentinel.fileno()))
        client._is_ready = True
        assert client.is_alive
        await client.close()
    assert not client.is_alive


async def test_who_gives_up_sending_is_not_told_that_the_process_has_died() -> None:
    client, sending = await sending_client()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    await client.close()


async def test_a_client_whose_process_never_was_can_be_killed_and_closed() -> None:
    client = EngineClient()
    unsendable = ModelConfig(model=threading.Lock())  # type: ignore[arg-type]  # so it cannot start
    with pytest.raises(TypeError, match="pickle"):
        await client.start(EngineConfig(model=unsendable))
    await client.kill()
    await client.close()
    assert not client.is_alive


async def test_a_process_whose_start_was_interrupted_can_be_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def interrupted_at_its_end() -> Iterator[None]:
        yield
        raise KeyboardInterrupt

    monkeypatch.setattr(process_module, "_sigint_blocked", interrupted_at_its_end)
    client = EngineClient()
    with pytest.raises(KeyboardInterrupt):
        await client.start(engine_config(model=str(tmp_path)))
    assert client.is_alive
    await client.kill()
    await client.close()
    assert not client.is_alive


async def test_a_process_that_never_gets_ready_is_told_of_and_can_be_ended(tmp_path: Path) -> None:
    client = EngineClient()
    config = engine_config(model=str(tmp_path), engine_ready_timeout=0.01)
    with pytest.raises(EngineDeadError, match=r"not ready in 0.01 s.*--engine-ready-timeout"):
        await client.start(config)
    await client.close()
    assert not client.is_alive


@pytest.mark.parametrize(
    ("late", "told"),
    [
        (
            [(0,), (1,)],
            "not ready in 0.5 s: the other ranks were waiting for rank 1; see that the disk of m "
            "answers and that nothing else takes its cores, or raise --engine-ready-timeout",
        ),
        ([(1, 2)], "waiting for ranks 1, 2; see .* takes their cores, or raise"),
        ([(1,), ()], "not ready in 0.5 s, and none of its 3 ranks is known to be later than"),
    ],
)
async def test_ranks_that_others_wait_for_are_named_when_the_engine_is_late(
    late: list[tuple[int, ...]], told: str
) -> None:
    def say(_: EngineConfig, __: str, reply_address: str) -> None:
        for ranks in late:
            RankNews(reply_address).late(ranks)

    here, there = socket.socketpair()
    with here, there:
        client = EngineClient(process=Mock(pid=1, sentinel=here.fileno(), run=say))
        config = engine_config(model="m", engine_ready_timeout=0.5, tensor_parallel_size=3)
        try:
            with pytest.raises(EngineDeadError, match=told):
                await client.start(config)
        finally:
            await client.close()


async def test_an_engine_that_says_why_it_ends_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", lambda code: None)

    def say(_: EngineConfig, __: str, reply_address: str) -> None:
        news = RankNews(reply_address)
        news._send(EngineReady())
        news.note_ready()
        news.lost(RankLostError("rank 1 hangs"))
        threading.Timer(0.5, there.close).start()

    here, there = socket.socketpair()
    with here, there:
        process = Mock(pid=1, sentinel=here.fileno(), run=say, exit_code=71)
        client = EngineClient(process=process)
        try:
            await client.start(engine_config(model="m", tensor_parallel_size=2))
            with pytest.raises(EngineDeadError, match="the engine has ended: rank 1 hangs"):
                await client.receive()
        finally:
            await client.close()


@pytest.mark.parametrize(
    ("exit_code", "told"),
    [
        (-signal.SIGKILL, "out of memory"),
        (-signal.SIGBUS, "mapped was cut"),
        (1, "log"),
        (None, "log"),
    ],
)
def test_the_end_of_a_process_has_a_likely_cause(exit_code: int | None, told: str) -> None:
    assert told in likely_cause(exit_code)
