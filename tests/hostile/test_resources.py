"""Bodies that are small to send and large to hold, on every route."""

from __future__ import annotations

import tracemalloc

import pytest

from tests.fakes.engine import FakeEngine
from tests.hostile.test_bodies import ROUTES
from tests.server.clients import client_for, error_of

BODY_BYTES = 2**20
MAX_PEAK = 12 * BODY_BYTES  # of lists it would be 64 bytes for each 3

FILLINGS = {
    "lists": b"[],",
    "objects": b"{},",
    "keys": b'{"a":1},',
    "strings": b'"",',
}


@pytest.mark.parametrize("url", ROUTES)
@pytest.mark.parametrize("filling", FILLINGS)
async def test_no_body_takes_memory_many_times_its_size(url: str, filling: str) -> None:
    item = FILLINGS[filling]
    body = b'{"user":[' + item * (BODY_BYTES // len(item)) + b"0]}"
    async with client_for(FakeEngine()) as client:
        await client.post(url, content=b"{}")  # what is made once is no body's
        tracemalloc.start()
        try:
            headers = {"Content-Type": "application/json"}
            response = await client.post(url, content=body, headers=headers)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert "the body holds" in str(error_of(response, 400)["message"])
    assert peak < MAX_PEAK
