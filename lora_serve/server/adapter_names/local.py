"""Adapters' names on a server without a catalog: they are the engine's own business."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from lora_serve.catalog.records import Standing
from lora_serve.catalog.rollout import Rollout
from lora_serve.engine.frontend.resolver import AdapterResolver
from lora_serve.errors import NotFoundError
from lora_serve.identity import BASE_MODEL, Everything, NoAdapter
from lora_serve.server.adapter_names.base import Loaded, NotServed
from lora_serve.server.admin.adapter_changes import AdapterChanges
from lora_serve.server.admin.protocol import AdapterWish
from lora_serve.server.engine_api import Engine


class LocalNames:
    """Names of this server alone."""

    is_shared = False
    replica_id = catalog = None
    unable: Collection[str] = ()

    def __init__(self, engine: Engine) -> None:
        self.changes = AdapterChanges()
        self._engine = engine
        self._resolver = AdapterResolver(engine.config.lora, engine.load_lora_adapter)

    @property
    def loaded(self) -> str:
        num_loaded = len(self._engine.config.lora.modules)  # else the engine had not started
        return f"{num_loaded} loaded" if num_loaded else ""

    def not_served(self) -> Iterator[NotServed]:
        return iter(())

    def check_ready(self) -> None:
        pass

    async def admit(self, name: str | NoAdapter) -> None:
        if name is not BASE_MODEL and self._engine.adapter(name) is None:
            await self._resolver.resolve(name)  # of what is nowhere, the engine tells

    async def load(self, wish: AdapterWish, by: str) -> Loaded:
        return Loaded(
            await self._engine.load_lora_adapter(
                wish.lora_name,
                wish.lora_path,
                wish.load_inplace,
                pinned=wish.pinned,
                digest=wish.digest,
            )
        )

    async def unload(self, name: str, by: str) -> Rollout | None:
        await self._engine.unload_lora_adapter(name)
        return None

    async def reset(self, name: str | Everything, by: str) -> bool:
        await self._engine.reset_prefix_cache(name)
        return True

    async def rollouts(self, names: Sequence[str]) -> dict[str, Rollout]:
        return {}

    async def standings(self) -> Sequence[Standing]:
        return ()

    async def forget(self, replica_id: str, *, has_ended: bool = False) -> None:
        raise NotFoundError(
            f"no replica '{replica_id}': this server was started without --lora-catalog",
            "replica_id",
        )
