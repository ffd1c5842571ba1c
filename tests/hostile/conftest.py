from __future__ import annotations

import pytest

from tests.fakes.engine import FakeEngine


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()
