from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from benchmarks.peers.servers.token_server import Emit, token_server
from lora_serve.bench.client import Endpoint
from lora_serve.bench.http_stream import Origin
from lora_serve.bench.load import run_load
from lora_serve.bench.workload import TimedRequest


class Echo:
    """Gives the prompt's first token again and again, with the adapter's number added."""

    def generate(
        self, token_ids: list[int], max_tokens: int, adapter: str | None, emit: Emit
    ) -> None:
        if adapter == "broken":
            raise RuntimeError("out of memory")
        for _ in range(max_tokens):
            emit(token_ids[0] + int(adapter or 0))


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    server = token_server(Echo(), 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Endpoint(Origin.parse(f"http://127.0.0.1:{server.server_port}"), "base")
    server.shutdown()
    thread.join()
    server.server_close()


async def test_tokens_come_as_events_of_a_completions_stream(endpoint: Endpoint) -> None:
    requests = [TimedRequest((5, 6), 3), TimedRequest((7,), 2, "100")]
    base, adapted = (await run_load(endpoint, requests)).records
    assert (base.error, base.text, base.output_tokens) == (None, " 5 5 5", 3)
    assert (adapted.error, adapted.text) == (None, " 107 107")


async def test_an_engines_error_reaches_the_client(
    endpoint: Endpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    (record,) = (await run_load(endpoint, [TimedRequest((5,), 3, "broken")])).records
    assert record.error is not None
    assert "RuntimeError: out of memory" in record.error
    assert "Traceback" in capfd.readouterr().err
