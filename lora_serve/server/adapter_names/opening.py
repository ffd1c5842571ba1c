"""Opens adapters' names for as long as a server runs, by what its settings say of a catalog."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from lora_serve.catalog.records import Member
from lora_serve.config import CatalogConfig, ServerConfig
from lora_serve.errors import CatalogUnavailableError, LoraServeError
from lora_serve.server.adapter_names.base import AdapterNames
from lora_serve.server.adapter_names.catalogued import CataloguedNames
from lora_serve.server.adapter_names.local import LocalNames
from lora_serve.server.engine_api import Engine

logger = logging.getLogger(__name__)

STARTS_WITHOUT = (
    "the server starts though the catalog has not answered: until it does, /health and requests "
    "for adapters get 503, and the base model is served; then the catalog's adapters are loaded, "
    "and those of --lora-modules that it does not know"
)
START_SECONDS = 10.0  # for which a start waits for the catalog; then it goes on without


@asynccontextmanager
async def opened_names(
    engine: Engine, server: ServerConfig, config: CatalogConfig
) -> AsyncIterator[AdapterNames]:
    """Names for as long as the server runs. At the end this server signs off from its catalog.

    Raises:
        AdapterError: an adapter of --lora-modules cannot be loaded into the catalog.
    """
    if not config.lora_catalog:
        yield LocalNames(engine)
        return
    names = CataloguedNames(engine, config, member_of(server, config))
    async with names.replica.running():
        loading = asyncio.create_task(_load_modules(names, engine.config.lora.modules))
        try:
            await asyncio.wait([loading], timeout=START_SECONDS)
            if loading.done():
                loading.result()
            elif not names.replica.view.is_current:
                logger.warning(STARTS_WITHOUT)
            yield names
        finally:
            loading.cancel()


async def _load_modules(names: CataloguedNames, modules: Sequence[tuple[str, str]]) -> None:
    """Load them once the catalog answers. What is wrong with one then ends no server that runs."""
    begin, has_told = time.monotonic(), False
    while True:
        try:
            await names.replica.wait_until_ready()
            return await names.load_modules(modules)
        except CatalogUnavailableError as error:
            if modules and not has_told:
                logger.warning("--lora-modules wait until the catalog answers: %s", error)
            has_told = True
            await asyncio.sleep(1)
        except LoraServeError as error:
            if time.monotonic() - begin < START_SECONDS:
                raise
            logger.error("--lora-modules: %s", error)
            return None


def member_of(server: ServerConfig, config: CatalogConfig) -> Member:
    """This process, as others know it."""
    place = f"{socket.gethostname()}:{server.uds or server.port}"
    scheme = "https" if server.ssl_certfile else "http"
    address = f"unix:{server.uds}" if server.uds else f"{scheme}://{place}"
    return Member(
        replica_id=config.lora_replica_id or place,
        address=config.lora_replica_address or address,
        incarnation=uuid.uuid4().hex,
    )
