from __future__ import annotations

from benchmarks.soak.hostile import read_slowly
from lora_serve.bench.http_stream import Origin
from tests.fakes.engine import FakeEngine
from tests.server.clients import serving


async def test_a_server_on_a_loopback_address_answers_the_slow_reader() -> None:
    async with serving(FakeEngine(max_model_len=1024)) as url:
        status, end = await read_slowly(Origin.parse(url), seconds=0.0)
    assert status == 200, end
    assert "data: [DONE]" in end
