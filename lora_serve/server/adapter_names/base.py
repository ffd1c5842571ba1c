"""The interface to adapters' names, with a catalog or without one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from lora_serve.catalog.records import Failure, Record, Standing
from lora_serve.catalog.rollout import Rollout
from lora_serve.errors import LoraServeError
from lora_serve.identity import Everything, NoAdapter
from lora_serve.messages import AdapterInfo
from lora_serve.server.admin.adapter_changes import AdapterChanges
from lora_serve.server.admin.protocol import AdapterWish


@dataclass(frozen=True, slots=True)
class Loaded:
    """What stands under a name after a load. rollout: how far it came, where there is a catalog."""

    adapter: AdapterInfo
    rollout: Rollout | None = None


@dataclass(frozen=True, slots=True)
class NotServed:
    """A name of the catalog that this server has no version of.

    failure: why; None while it is being loaded. refusal: what a request for it is told.
    """

    record: Record
    failure: Failure | None
    refusal: LoraServeError


class AdapterNames(Protocol):
    """`LocalNames` or `CataloguedNames`. by: who asks, as the log calls them."""

    changes: AdapterChanges

    @property
    def is_shared(self) -> bool:
        """Whether other servers follow."""

    @property
    def replica_id(self) -> str | None:
        """What this server is called among them; None without a catalog."""

    @property
    def catalog(self) -> str | None:
        """Where names stand, and as whom this server is known there, for people; None without."""

    @property
    def loaded(self) -> str:
        """How many adapters a start has loaded, for people; "" for none."""

    @property
    def unable(self) -> Collection[str]:
        """Names that this server refuses, because it cannot have what the catalog says of them."""

    def not_served(self) -> Iterator[NotServed]:
        """Names that stand for something, though not on this server yet."""

    def check_ready(self) -> None:
        """Raise CatalogUnavailableError until it is known which adapters there are."""

    async def admit(self, name: str | NoAdapter) -> None:
        """Wait until a request for this name may go to the engine.

        Raises:
            AdapterUnavailableError, CatalogUnavailableError: it may not, for now.
        """

    async def load(self, wish: AdapterWish, by: str) -> Loaded:
        """Load an adapter, on all servers. Raises AdapterError, CatalogUnavailableError."""

    async def unload(self, name: str, by: str) -> Rollout | None:
        """Take a name away, on all servers. Raises AdapterError, CatalogUnavailableError."""

    async def reset(self, name: str | Everything, by: str) -> bool:
        """Forget KV: of a name on all servers, or everything on this one. Whether all is done."""

    async def rollouts(self, names: Sequence[str]) -> dict[str, Rollout]:
        """How far the last changes of these names came; nothing without a catalog.

        Raises:
            CatalogUnavailableError: the store cannot be asked.
        """

    async def standings(self) -> Sequence[Standing]:
        """The servers of the catalog; none without one. Raises CatalogUnavailableError."""

    async def forget(self, replica_id: str, *, has_ended: bool = False) -> None:
        """Wait no longer for a server that is gone, as its silence tells if nobody else does.

        Raises NotFoundError, InvalidRequestError.
        """
