from __future__ import annotations

from pathlib import Path

import pytest

from lora_serve.cli.serve_run import EarlyTokenizer
from lora_serve.config import EngineConfig, ModelConfig
from lora_serve.engine.frontend import starting
from lora_serve.engine.frontend.starting import begin_reading, start_parts
from lora_serve.errors import ConfigError
from tests.fakes.engine_client import FakeClient


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    client = FakeClient()
    monkeypatch.setattr(starting, "EngineClient", lambda process: client)
    return client


async def test_a_tokenizer_that_is_being_read_is_read_once(
    client: FakeClient, model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was begun while the engine's process imported what it needs."""
    model = ModelConfig(model=str(model_path))
    early = EarlyTokenizer()
    early.begin(model)
    assert early.reading is not None
    monkeypatch.setattr(starting, "Tokenizer", None)  # there must be no other
    parts = await start_parts(EngineConfig(model=model), None, early.reading)
    assert parts.tokenizer is early.reading.result()
    assert parts.tokenizer.encode("hello")


async def test_why_there_is_no_tokenizer_is_told_and_the_engine_ended(
    client: FakeClient, tmp_path: Path
) -> None:
    model = ModelConfig(model=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="no tokenizer at "):
        await start_parts(EngineConfig(model=model), None, begin_reading(model))
    assert client.was_closed


def test_a_tokenizer_of_the_hub_is_read_when_the_engine_starts() -> None:
    """A download may take any time, for which a server that is refused must not wait."""
    early = EarlyTokenizer()
    early.begin(ModelConfig(model="org/name"))
    assert early.reading is None
