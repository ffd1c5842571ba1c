"""One replica: an engine, and the whole server's application, asked by messages instead of HTTP.

Knows no Ray, and listens on no port.
"""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator

from starlette.types import ASGIApp

from lora_serve.config import EngineConfig, ServerConfig
from lora_serve.errors import EngineDeadError
from lora_serve.fleet.asgi_call import answer_of, whole_answer
from lora_serve.fleet.messages import AnswerHead, RequestHead, WholeAnswer
from lora_serve.fleet.reports import Reporter, Stats
from lora_serve.server.admin.adapter_spool import AdapterSpool, reading_spool
from lora_serve.server.engine_api import Engine
from lora_serve.text.without_torch import import_transformers


class Replica:
    """Made by `start`; `close` ends it."""

    def __init__(
        self, replica_id: str, engine: Engine, app: ASGIApp, spool: AdapterSpool | None = None
    ) -> None:
        self._replica_id = replica_id
        self._engine = engine
        self._app = app
        self._spool = spool
        self._reporter = Reporter(engine)

    @classmethod
    async def start(cls, replica_id: str, config: EngineConfig, server: ServerConfig) -> Replica:
        """Load the model. Raises ConfigError if it cannot be served as asked."""
        import_transformers()
        from lora_serve.engine.frontend.async_engine import AsyncEngine
        from lora_serve.server.app import create_app

        spool = AdapterSpool(server.max_lora_spool_bytes)
        try:
            engine = await AsyncEngine.start(reading_spool(config, spool))
        except BaseException:
            spool.close()
            raise
        app = create_app(engine, server, spool=spool)
        gc.collect()
        gc.freeze()  # as for one server: a full collection would hold the event loop
        return cls(replica_id, engine, app, spool)

    async def answer(
        self, head: RequestHead, body: bytes
    ) -> AsyncGenerator[str | AnswerHead | bytes, None]:
        """This replica's id at once; then the answer, as `answer_of` gives it."""
        yield self._replica_id
        async for part in answer_of(self._app, head, body, self._begin):
            yield part

    async def answer_whole(self, head: RequestHead, body: bytes) -> WholeAnswer:
        """The same at once."""
        return await whole_answer(self._app, head, body, self._begin)

    async def stats(self) -> Stats:
        return await self._reporter.stats()

    async def close(self) -> None:
        await self._engine.shutdown()
        if self._spool is not None:
            self._spool.close()

    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> AnswerHead:
        return AnswerHead(
            status=status,
            headers=tuple(headers),
            replica_id=self._replica_id,
            must_go_elsewhere=status == 503 and not self._has_engine,
        )

    @property
    def _has_engine(self) -> bool:
        try:
            self._engine.check_health()
        except EngineDeadError:
            return False
        return True
