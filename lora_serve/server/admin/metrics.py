"""GET /metrics: one page for Prometheus, on the server's own port or on one for scrapers alone.

However many ask, pages are made for a small share of the time, and all who wait get the same one.
It names adapters, so who may read it is the KeyRing's to say, but for the port of --metrics-port.
"""

from __future__ import annotations

import asyncio
import time

from fastapi import APIRouter, FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from lora_serve.errors import LoraServeError
from lora_serve.observability.http import HTTPMetrics
from lora_serve.server.engine_api import Engine
from lora_serve.server.http.auth import METRICS_PATH, KeyRing, caller_of
from lora_serve.server.http.errors import ErrorBoundary, answer_http_error
from lora_serve.server.http.hosts import AllowedHosts, HostCheck
from lora_serve.server.http.including import include_router

PAGE_SECONDS = 1.0  # at most from the beginning of one page to that of the next
PAUSE_SHARE = 20  # a page that is made sooner waits for so many times what the last one took
ENGINE_SECONDS = 2.0  # in which the engine must tell its gauges
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


class MetricsPage:
    """The page of this moment. It is rendered in the server's process, never in the engine's.

    http: the counts of requests, for the middleware that counts them.
    """

    def __init__(self, engine: Engine) -> None:
        self.http = HTTPMetrics()
        self._engine = engine
        self._next: asyncio.Task[bytes] | None = None  # the page that those who ask now will get
        self._may_begin_at = time.monotonic()

    async def text(self) -> bytes:
        """What is counted when this returns, or up to ENGINE_SECONDS before."""
        if self._next is None:
            self._next = asyncio.create_task(self._make(), name="metrics-page")
        return await asyncio.shield(self._next)  # one who leaves must not take it from others

    async def _make(self) -> bytes:
        await asyncio.sleep(self._may_begin_at - time.monotonic())
        begin = time.monotonic()
        self._next, self._may_begin_at = None, begin + PAGE_SECONDS
        await self._refresh()
        page = self._engine.metrics.render() + self.http.render()
        pause = min(PAGE_SECONDS, PAUSE_SHARE * (time.monotonic() - begin))
        self._may_begin_at = begin + pause
        return page

    async def _refresh(self) -> None:
        """Ask for the gauges; a busy or dead engine leaves the last ones standing."""
        metrics = self._engine.metrics
        try:
            async with asyncio.timeout(ENGINE_SECONDS):
                await self._engine.get_stats()
                if self._engine.config.lora.enable_lora:
                    metrics.observe_adapters(await self._engine.list_adapters())
        except (LoraServeError, TimeoutError):
            metrics.count_stale_scrape()


def metrics_router(page: MetricsPage, keys: KeyRing | None = None) -> APIRouter:
    """keys: say who may read the page; without them every client may."""
    router = APIRouter()

    @router.head(METRICS_PATH, include_in_schema=False)
    @router.get(METRICS_PATH)
    async def metrics(request: Request) -> Response:
        if keys is not None and keys.guards_metrics:
            keys.require_operator(caller_of(request))
        return Response(await page.text(), media_type=PROMETHEUS_TEXT)

    return router


def metrics_app(page: MetricsPage, hosts: AllowedHosts) -> FastAPI:
    """What --metrics-port serves: the page, and nothing else."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    include_router(app, metrics_router(page))
    app.add_exception_handler(HTTPException, answer_http_error)
    app.add_middleware(HostCheck, hosts=hosts)
    app.add_middleware(ErrorBoundary)
    return app
