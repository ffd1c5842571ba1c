from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.fakes.engine import FakeEngine
from tests.server.clients import client_for


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with client_for(engine) as client:
        yield client
