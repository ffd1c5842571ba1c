"""The demo's artefacts, trained once for all sessions that run the same sources."""

from __future__ import annotations

import pytest

from lora_serve.demo.model import DemoPaths, ensure_demo


@pytest.fixture(scope="session")
def demo_paths() -> DemoPaths:
    return ensure_demo(print)
