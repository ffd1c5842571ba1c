from __future__ import annotations

import pytest

from lora_serve.bench.catalog import served_models
from lora_serve.bench.http_stream import Origin
from lora_serve.errors import ConfigError
from tests.fakes.timed_server import TimedServer


async def test_adapters_are_told_from_models_by_their_parent() -> None:
    async with TimedServer(models=("base", "alias"), adapters=("x", "y")).listening() as url:
        catalog = await served_models(Origin.parse(url))
    assert (catalog.models, catalog.adapters) == (("base", "alias"), ("x", "y"))


async def test_a_server_without_models_is_refused_with_the_way_out() -> None:
    async with TimedServer(models=()).listening() as url:
        with pytest.raises(ConfigError, match="--served-model"):
            await served_models(Origin.parse(url))


async def test_no_server_at_the_url_is_a_clear_error() -> None:
    async with TimedServer().listening() as url:
        pass
    with pytest.raises(ConfigError, match="is a server there"):
        await served_models(Origin.parse(url))
