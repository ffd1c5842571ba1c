from __future__ import annotations

import pytest

from benchmarks.soak import hostile
from benchmarks.soak.hostile import HOSTILE_BODIES, SLOW_READER_ID, read_slowly
from lora_serve.bench.http_stream import Origin
from tests.fakes.engine import FakeEngine, fake_config
from tests.server.clients import serving


async def test_a_server_on_a_loopback_address_answers_the_slow_reader() -> None:
    async with serving(FakeEngine(max_model_len=1024)) as url:
        status, end = await read_slowly(Origin.parse(url), seconds=0.0)
    assert status == 200, end
    assert "data: [DONE]" in end


async def test_a_server_refuses_hostile_bodies_as_the_soak_expects() -> None:
    """Bodies for its own routes and limits; a fake engine has other adapters."""
    engine = FakeEngine(fake_config(enable_prompt_embeds=True), max_model_len=1024)
    unexpected = []
    async with serving(engine) as url:
        for body in HOSTILE_BODIES:
            status, text = await body.send(Origin.parse(url))
            if status not in body.statuses:
                unexpected.append((body.title, status, text[:200]))
    assert not unexpected


async def test_the_slow_reader_reads_nothing_until_the_server_is_done_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits as long as that takes: a slow machine fills no buffer in a few seconds."""
    heard = [SLOW_READER_ID, "", SLOW_READER_ID, "[]", SLOW_READER_ID]

    async def listed(origin: Origin, path: str) -> str:
        return heard.pop(0)

    monkeypatch.setattr(hostile, "get", listed)
    monkeypatch.setattr(hostile, "LOOK_SECONDS", 0.0)
    async with serving(FakeEngine(max_model_len=1024)) as url:
        status, _ = await read_slowly(Origin.parse(url), seconds=60.0)
    assert status == 200
    assert heard == [SLOW_READER_ID], "it read before, or waited on"
