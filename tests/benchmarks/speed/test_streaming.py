from __future__ import annotations

from pathlib import Path

from benchmarks.speed.streaming import measure, measure_sockets
from tests.benchmarks.common.test_make_checkpoint import model  # noqa: F401  a fixture


async def test_every_token_of_every_stream_is_told(model: Path) -> None:  # noqa: F811
    result = await measure(model, num_streams=3, num_tokens=20)
    assert (result.num_streams, result.num_tokens) == (3, 20)
    assert result.num_events >= 50  # a token that only begins a character waits for the next
    assert result.microseconds_per_token > 0


async def test_every_token_is_told_over_sockets_too(model: Path) -> None:  # noqa: F811
    result = await measure_sockets(model, 3, 20, "h11")
    assert (result.way, result.num_events >= 50) == ("h11", True)
    assert result.microseconds_per_token > 0
