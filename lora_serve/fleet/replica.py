"""One replica: an engine, and the whole server's application, asked by messages instead of HTTP.

Knows no Ray, and listens on no port.
"""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import AsyncExitStack, closing

from starlette.types import ASGIApp

from lora_serve.config import CatalogConfig, EngineConfig, ServerConfig
from lora_serve.engine.frontend.rank_checks import warn_of_shared_cores
from lora_serve.errors import CatalogUnavailableError, EngineDeadError
from lora_serve.fleet.asgi_call import answer_of, whole_answer
from lora_serve.fleet.lost_replicas import HasEnded, lost_ones_forgotten
from lora_serve.fleet.messages import AnswerHead, RequestHead, WholeAnswer
from lora_serve.fleet.reports import Reporter, Stats
from lora_serve.server.adapter_names.base import AdapterNames
from lora_serve.server.adapter_names.opening import opened_names
from lora_serve.server.admin.adapter_spool import AdapterSpool, reading_spool
from lora_serve.server.engine_api import Engine
from lora_serve.server.http.auth import KeyRing
from lora_serve.server.http.errors import OF_THIS_SERVER_KEY
from lora_serve.server.http.repeated_warnings import bounded_warnings
from lora_serve.server.throughput import throughput_lines
from lora_serve.server.tracing import open_tracing
from lora_serve.text.without_torch import import_for_tokenizer


class Replica:
    """Made by `start`; `close` ends it."""

    def __init__(
        self,
        replica_id: str,
        engine: Engine,
        app: ASGIApp,
        names: AdapterNames,
        keys: KeyRing,
    ) -> None:
        self._replica_id = replica_id
        self._engine = engine
        self._app = app
        self._names = names
        self._keys = keys
        self._reporter = Reporter(engine, self._unable)
        self._parts = AsyncExitStack()

    @classmethod
    async def start(
        cls,
        replica_id: str,
        config: EngineConfig,
        server: ServerConfig,
        catalog: CatalogConfig,
        has_ended: HasEnded,
    ) -> Replica:
        """Load the model.

        Args:
            has_ended: whether a replica has ended for good; may block.

        Raises:
            ConfigError: the model cannot be served as asked.
            AdapterError: one of --lora-modules cannot be loaded.
        """
        warn_of_shared_cores(config)  # here: it may be another machine than where it was asked
        import_for_tokenizer(config.model.tokenizer or config.model.model)
        from lora_serve.engine.frontend.async_engine import AsyncEngine
        from lora_serve.server.app import create_app

        async with AsyncExitStack() as parts:
            spool = parts.enter_context(closing(AdapterSpool(server.max_lora_spool_bytes)))
            tracing, keys = open_tracing(server), KeyRing(server)
            if tracing is not None:
                parts.callback(tracing.close)
            engine = await AsyncEngine.start(
                reading_spool(config, spool), loads_modules=not catalog.lora_catalog
            )
            parts.push_async_callback(engine.shutdown)
            names = await parts.enter_async_context(opened_names(engine, server, catalog))
            await parts.enter_async_context(lost_ones_forgotten(names, has_ended))
            await parts.enter_async_context(bounded_warnings())
            await parts.enter_async_context(throughput_lines(engine, config.log))
            app = create_app(engine, server, keys=keys, spool=spool, tracing=tracing, names=names)
            gc.collect()
            gc.freeze()  # as for one server: a full collection would hold the event loop
            replica = cls(replica_id, engine, app, names, keys)
            replica._parts = parts.pop_all()
            return replica
        raise AssertionError("it returns, or raises what is wrong")

    async def answer(
        self, head: RequestHead, body: bytes
    ) -> AsyncGenerator[str | AnswerHead | bytes, None]:
        """This replica's id at once; then the answer, as `answer_of` gives it."""
        yield self._replica_id
        async for part in answer_of(self._app, head, body, self._begin):
            yield part

    async def answer_whole(self, head: RequestHead, body: bytes) -> WholeAnswer:
        """Answer as `answer` does, but with the whole answer at once."""
        return await whole_answer(self._app, head, body, self._begin)

    async def stats(self) -> Stats:
        return await self._reporter.stats()

    def reload_keys(self) -> None:
        """Take the key files as they are now; the old keys stay where they cannot be read."""
        self._keys.reload_or_keep()

    async def close(self) -> None:
        await self._parts.aclose()

    def _begin(
        self, status: int, headers: list[tuple[bytes, bytes]], state: Mapping[str, object]
    ) -> AnswerHead:
        return AnswerHead(
            status=status,
            headers=tuple(headers),
            replica_id=self._replica_id,
            must_go_elsewhere=OF_THIS_SERVER_KEY in state
            or (status == 503 and not self._has_engine),
        )

    def _unable(self) -> Collection[str] | None:
        """Names of which it can answer for none now; None if that is so for all of them."""
        try:
            self._names.check_ready()
        except CatalogUnavailableError:
            return None
        return self._names.unable

    @property
    def _has_engine(self) -> bool:
        try:
            self._engine.check_health()
        except EngineDeadError:
            return False
        return True
