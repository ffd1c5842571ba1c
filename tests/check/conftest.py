"""A lab over a made-up server, in the test's own loop."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from lora_serve.check.adapters import Workspace
from lora_serve.check.facts import discover
from lora_serve.check.lab import Lab
from lora_serve.check.server import Server, Target
from lora_serve.check.subjects import Settings
from tests.fakes.cached_server import CachedServer
from tests.fakes.http_server import listening

CONFIG = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
}
NONCE = "c0ffee"

OpenLab = Callable[..., AbstractAsyncContextManager[Lab]]


@pytest.fixture(scope="session")
def model_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return directory


@pytest.fixture
def open_lab(tmp_path: Path) -> OpenLab:
    """A lab over a server: what its settings and the client's time limit are may be said."""

    @asynccontextmanager
    async def opened(
        fake: CachedServer, *, timeout_seconds: float = 20.0, **settings: object
    ) -> AsyncIterator[Lab]:
        chosen = Settings(nonce=NONCE, **{"num_pressing": 8, **settings})  # type: ignore[arg-type]
        with Workspace(tmp_path) as workspace:
            async with (
                listening(fake) as url,
                Server(Target(url=url, timeout_seconds=timeout_seconds)) as server,
            ):
                facts = await discover(server, "", chosen.num_prompt_tokens, NONCE)
                lab = Lab(server, facts, chosen, workspace)
                try:
                    yield lab
                finally:
                    await lab.forget_references()

    return opened
