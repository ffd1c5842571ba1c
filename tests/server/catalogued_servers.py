"""Servers in memory that share a catalog's file."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx

from lora_serve.config import CatalogConfig, EngineConfig, LoRAConfig, ModelConfig, ServerConfig
from lora_serve.server.adapter_names.base import AdapterNames
from lora_serve.server.adapter_names.opening import opened_names
from lora_serve.server.app import create_app
from tests.fakes.engine import FakeEngine


class Fleet:
    """Servers by their ids, each with a client."""

    def __init__(self, tmp_path: Path) -> None:
        self.catalog = tmp_path / "catalog"
        self.engines: dict[str, FakeEngine] = {}
        self.names: dict[str, AdapterNames] = {}
        self._stack = AsyncExitStack()

    async def start(
        self,
        name: str,
        engine: type[FakeEngine] = FakeEngine,
        server: ServerConfig | None = None,
        **lora: Any,
    ) -> httpx.AsyncClient:
        model = ModelConfig(model="/models/tiny", served_model_name=("base/model",))
        made = engine(EngineConfig(model=model, lora=LoRAConfig(enable_lora=True, **lora)))
        config = CatalogConfig(lora_catalog=str(self.catalog), lora_replica_id=name)
        server = server or ServerConfig()
        names = await self._stack.enter_async_context(opened_names(made, server, config))
        self.engines[name], self.names[name] = made, names
        app = create_app(made, server, names=names)
        return await self._stack.enter_async_context(
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        )

    async def stop(self) -> None:
        await self._stack.aclose()
        self._stack = AsyncExitStack()
