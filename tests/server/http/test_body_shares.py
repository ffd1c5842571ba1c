"""API keys share the room for bodies: one that takes most of it gives way to the others."""

from __future__ import annotations

import asyncio

import pytest

from lora_serve.config import ServerConfig
from lora_serve.server.http import body_shares
from lora_serve.server.http.body_room import BodyRoom
from lora_serve.server.http.shares import Wish
from tests.fakes.engine import FakeEngine
from tests.server.clients import serving

CONTENT = b'{"prompt": "hi", "max_tokens": 1}'
KIB = 2**10


class Upload:
    """A body of one key that is sent piece by piece."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def begin(cls, url: str, key: str, num_bytes: int) -> Upload:
        host, port = url.removeprefix("http://").split(":")
        upload = cls(*await asyncio.open_connection(host, int(port)))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {num_bytes}\r\n\r\n"
        )
        await upload.send(head.encode())
        return upload

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def status(self) -> int:
        line = await asyncio.wait_for(self._reader.readline(), 10)
        self._writer.close()
        return int(line.split()[1])

    def close(self) -> None:
        self._writer.close()


@pytest.mark.parametrize(("key", "status"), [("patient", 200), ("greedy", 408)])
async def test_a_slow_body_gives_way_to_another_keys_flood_only_if_that_holds_less(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, key: str, status: int
) -> None:
    """The same body, sent with the greedy key, is the slowest of that key, and is ended."""
    monkeypatch.setattr(body_shares, "GRACE_SECONDS", 0.2)
    config = ServerConfig(max_total_body_bytes=2048 * KIB, api_key=("patient", "greedy"))
    async with serving(engine, config) as url:
        slow = await Upload.begin(url, key, 100 * KIB)
        await slow.send(CONTENT.ljust(80 * KIB))
        await asyncio.sleep(0.3)
        flood = [await Upload.begin(url, "greedy", 1024 * KIB) for _ in range(6)]
        for upload in flood:
            await upload.send(b" " * (320 * KIB))
        await asyncio.sleep(0.3)
        more = await Upload.begin(url, "greedy", 1024 * KIB)
        await more.send(CONTENT.ljust(1024 * KIB))
        assert await more.status() == 200
        if status == 200:
            await slow.send(b" " * (20 * KIB))
        assert await slow.status() == status
        for upload in flood:
            upload.close()


async def test_a_keys_body_waits_for_none_of_another_key_that_holds_more() -> None:
    room = BodyRoom(100, "--max-total-body-bytes")
    order = []

    async def hold(share: str, num_bytes: int, until: asyncio.Event) -> None:
        with room.hold(share) as body:
            await room.add_in_turn(body, num_bytes)
            order.append(share)
            await until.wait()

    parsed, kept, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    ended.set()
    async with asyncio.TaskGroup() as group:
        group.create_task(hold("greedy", 60, parsed))
        group.create_task(hold("greedy", 40, kept))
        for share in ("greedy", "greedy", "modest"):
            group.create_task(hold(share, 50, ended))
        await asyncio.sleep(0.01)
        parsed.set()
        await asyncio.sleep(0.01)
        kept.set()
    assert order == ["greedy", "greedy", "modest", "greedy", "greedy"]


async def test_a_body_is_not_slow_because_it_waits_for_room() -> None:
    """It has little because others fill the room; one that stalls came with much at once."""
    shares = body_shares.BodyShares()
    stalls, waits = shares.open(""), shares.open("")
    for body, num_bytes in ((stalls, 300_000), (waits, 1000)):
        body.started -= 10.0
        shares.charge(body, num_bytes)
        shares.begin(body, asyncio.timeout(None))
    wish = Wish(waits, 1000, asyncio.get_running_loop().create_future())
    shares.wait(wish)
    assert waits.waits_since is not None
    waits.waits_since -= 9.99
    for _ in range(2):
        assert list(shares.slow_bodies(shares.open(""), 0.0)) == [stalls, waits]
        shares.stop_waiting(wish)  # what it has waited counts no more than what it waits


async def test_what_gives_way_is_the_fullest_shares_until_it_is_no_longer_the_fullest() -> None:
    shares = body_shares.BodyShares()
    sizes = {"a": (40, 30, 20), "b": (50,), "c": (10,)}
    for name, all_bytes in sizes.items():
        for num_bytes in all_bytes:
            body = shares.open(name)
            body.started -= 100.0
            shares.charge(body, num_bytes)
            shares.begin(body, asyncio.timeout(None))
    asking = shares.open("d")
    order = [(b.share.name, b.amount) for b in shares.slow_bodies(asking, 0.0)]
    assert order == [("a", 20), ("a", 30), ("b", 50), ("a", 40), ("c", 10)]
    for _ in range(2):
        shares.charge(shares.open("d"), 21)  # of several bodies: no share below them gives way
    order = [(b.share.name, b.amount) for b in shares.slow_bodies(asking, 0.0)]
    assert order == [("a", 20), ("a", 30), ("b", 50)]
    to_small_ones = [(b.share.name, b.amount) for b in shares.slow_bodies(None, 60.0)]
    assert to_small_ones == [("a", 20), ("a", 30)]
