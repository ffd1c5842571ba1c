"""The application: its routes and what surrounds them; and the server that serves it.

Owns no engine, but `run_server` shuts down the one it was given, because it alone can tell when the
last answer has been sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from contextlib import AbstractAsyncContextManager
from functools import partial

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from lora_serve import __version__
from lora_serve.config import ServerConfig
from lora_serve.errors import LoraServeError
from lora_serve.server.adapter_names.base import AdapterNames
from lora_serve.server.adapter_names.local import LocalNames
from lora_serve.server.admin.aborts import aborts_router
from lora_serve.server.admin.adapter_spool import AdapterSpool
from lora_serve.server.admin.adapters import adapters_router
from lora_serve.server.admin.metrics import MetricsPage, metrics_app, metrics_router
from lora_serve.server.admin.operations import operations_router
from lora_serve.server.admin.pauses import pauses_router
from lora_serve.server.admin.replicas import replicas_router
from lora_serve.server.admin.requests import requests_router
from lora_serve.server.admin.server_info import server_info_router
from lora_serve.server.anthropic.messages import messages_router
from lora_serve.server.api_page.router import api_page_router
from lora_serve.server.context import ServerContext
from lora_serve.server.engine_api import Engine
from lora_serve.server.error_shapes import ERROR_SHAPES
from lora_serve.server.http import second_port
from lora_serve.server.http.access_log import AccessLog
from lora_serve.server.http.auth import METRICS_PATH, Authentication, KeyRing
from lora_serve.server.http.body import BodyLimit, BodyReader
from lora_serve.server.http.connections import Connections
from lora_serve.server.http.cors import CrossOrigin
from lora_serve.server.http.drain import Drain, Draining
from lora_serve.server.http.errors import (
    ErrorBoundary,
    ErrorShapes,
    answer_error,
    answer_http_error,
)
from lora_serve.server.http.hosts import AllowedHosts, HostCheck
from lora_serve.server.http.including import include_router
from lora_serve.server.http.instrumentation import Instrumentation
from lora_serve.server.http.listener import Listeners, read_template
from lora_serve.server.http.repeated_warnings import bounded_warnings
from lora_serve.server.http.request_ids import RequestIds
from lora_serve.server.http.root_path import RootPath
from lora_serve.server.http.serving import SignalledServer, http_config, warn_of_open_server
from lora_serve.server.http.shutdown import ServerShutdown
from lora_serve.server.inference.generate import generate_router
from lora_serve.server.openai.chat import chat_router
from lora_serve.server.openai.chat_batch import chat_batch_router
from lora_serve.server.openai.chat_formats import ChatFormats
from lora_serve.server.openai.completions import completions_router
from lora_serve.server.openai.embeddings import embeddings_router
from lora_serve.server.openai.inputs import Inputs
from lora_serve.server.openai.models import ServedModels, models_router
from lora_serve.server.openai.render import render_router
from lora_serve.server.openai.text_work import TextWork
from lora_serve.server.openai.tokens import tokens_router
from lora_serve.server.openapi_document import DocumentRoute
from lora_serve.server.pooling.cohere import cohere_router
from lora_serve.server.pooling.pooling import pooling_router
from lora_serve.server.pooling.scores import scores_router
from lora_serve.server.responses.router import responses_router
from lora_serve.server.responses.store import StoredResponses
from lora_serve.server.routes import (
    GENERATING_PATHS,
    NOT_SERVED,
    OPEN_PATHS,
    PATHS,
    STATE_PATHS,
)
from lora_serve.server.sagemaker.invocations import invocations_router
from lora_serve.server.sglang.generate import sglang_router
from lora_serve.server.summary import start_summary, tell_summary
from lora_serve.server.throughput import throughput_lines
from lora_serve.server.tracing import RequestTracing, open_tracing
from lora_serve.server.ui.router import ui_router

logger = logging.getLogger(__name__)


def create_app(
    engine: Engine,
    config: ServerConfig,
    drain: Drain | None = None,
    keys: KeyRing | None = None,
    page: MetricsPage | None = None,
    spool: AdapterSpool | None = None,
    tracing: RequestTracing | None = None,
    names: AdapterNames | None = None,
) -> FastAPI:
    """All routes over one engine, /metrics if it has no port of its own.

    Refuses requests once `drain` has begun. spool: the caller's to close. names: this server's own
    if left out.

    Raises:
        ConfigError: --chat-template or a key file cannot be read, or --enable-auto-tool-choice
            with a template that holds no known format of tool calls.
    """
    context = _context(
        engine,
        config,
        drain or Drain(),
        keys or KeyRing(config),
        spool or AdapterSpool(config.max_lora_spool_bytes),
        names or LocalNames(engine),
    )
    page = page or MetricsPage(engine)
    app = _documented_app(config)
    _include_routers(app, context, page)
    app.add_exception_handler(LoraServeError, answer_error)
    metrics_port = config.metrics_port
    reasons = dict(NOT_SERVED)
    if metrics_port is not None:
        port_flag = f"--metrics-port {metrics_port}"
        reasons[METRICS_PATH] = f" on this port; {port_flag} gives it one of its own"
    not_found = partial(answer_http_error, paths=PATHS, reasons=reasons)
    app.add_exception_handler(HTTPException, not_found)
    _add_middleware(app, context, page, tracing)
    return app


def _context(
    engine: Engine,
    config: ServerConfig,
    drain: Drain,
    keys: KeyRing,
    spool: AdapterSpool,
    names: AdapterNames,
) -> ServerContext:
    """What the routes share; reads the chat template."""
    template = read_template(config.chat_template)
    texts = TextWork()
    return ServerContext(
        engine=engine,
        config=config,
        models=ServedModels(engine.config),
        keys=keys,
        drain=drain,
        bodies=BodyReader(config),
        adapter_bodies=_adapter_bodies(config),
        spool=spool,
        names=names,
        texts=texts,
        inputs=Inputs(engine, texts, template),
        chat_formats=ChatFormats(config, engine.tokenizer, template),
        responses=StoredResponses(
            config.max_stored_responses,
            config.max_stored_response_bytes,
            config.stored_response_seconds,
        ),
        chat_template=template,
    )


def _documented_app(config: ServerConfig) -> FastAPI:
    """An application without routes whose document is made of the table of routes."""
    # A redirect to the path with or without a slash would name the host that the client sent.
    app = FastAPI(
        title="lora-serve",
        version=__version__,
        redirect_slashes=False,
        openapi_url=None,  # FastAPI's makes the document on the event loop
        docs_url=None,  # FastAPI's loads its scripts from elsewhere, and knows no keys
        redoc_url=None,
    )
    if not config.disable_fastapi_docs:
        app.add_route("/openapi.json", DocumentRoute(config).answer, include_in_schema=False)
    return app


def _include_routers(app: FastAPI, context: ServerContext, page: MetricsPage) -> None:
    for router in (
        completions_router(context),
        chat_router(context),
        chat_batch_router(context),
        render_router(context),
        messages_router(context),
        embeddings_router(context),
        pooling_router(context),
        cohere_router(context),
        scores_router(context),
        responses_router(context),
        models_router(context.engine, context.models, int(time.time()), context.names),
        adapters_router(context),
        replicas_router(context),
        operations_router(context, page.http),
        pauses_router(context),
        aborts_router(context),
        requests_router(context),
        generate_router(context),
        sglang_router(context),
        invocations_router(context),
        server_info_router(context),
        tokens_router(context),
    ):
        include_router(app, router)
    if not context.config.disable_fastapi_docs:
        include_router(app, api_page_router())
    if not context.config.disable_ui:
        include_router(app, ui_router())
    if context.config.metrics_port is None:
        include_router(app, metrics_router(page, context.keys))


def _add_middleware(
    app: FastAPI, context: ServerContext, page: MetricsPage, tracing: RequestTracing | None
) -> None:
    """What surrounds every route; the last added is the outermost."""
    config, engine = context.config, context.engine
    needing_no_key = OPEN_PATHS if context.keys.guards_metrics else STATE_PATHS
    app.add_middleware(Authentication, keys=context.keys, open_paths=needing_no_key)
    app.add_middleware(Draining, drain=context.drain, state_paths=STATE_PATHS)
    hosts = AllowedHosts(config)
    app.add_middleware(CrossOrigin, config=config, hosts=hosts)
    app.add_middleware(HostCheck, hosts=hosts)
    app.add_middleware(ErrorBoundary)
    app.add_middleware(ErrorShapes, shapes=ERROR_SHAPES)
    app.add_middleware(RequestIds)
    app.add_middleware(
        Instrumentation,
        metrics=page.http,
        access_log=AccessLog(engine.config.log, engine.tokenizer.decode),
        generating_paths=GENERATING_PATHS,
        begin_span=None if tracing is None else tracing.begin,
    )
    if config.root_path:
        app.add_middleware(RootPath, prefix=config.root_path)


def _adapter_bodies(config: ServerConfig) -> BodyReader:
    limit = BodyLimit(config.max_lora_body_bytes, "--max-lora-body-bytes")
    return BodyReader(config, each=limit, total=limit)


async def run_server(
    engine: Engine,
    config: ServerConfig,
    listeners: Listeners,
    spool: AdapterSpool | None = None,
    names: AdapterNames | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT: finish what runs, refuse what comes, shut the engine down.

    What still runs after --drain-timeout, or at a second signal, is cut off.

    Args:
        listeners: from `open_listeners`; closed at the end.
        spool: where the engine may read adapters that come in bodies; the caller's to close.
        names: what adapters' names stand for; this server's own if left out.

    Raises:
        ConfigError: another server has begun to listen on the address in the meantime.
    """
    tracing = open_tracing(config)
    try:
        listeners.listen()
        drain, keys, page = Drain(), KeyRing(config), MetricsPage(engine)
        connections = Connections(config, AutoHTTPProtocol)
        names = names or LocalNames(engine)
        app = create_app(engine, config, drain, keys, page, spool, tracing, names)
        server = SignalledServer(
            http_config(app, config, connections),
            ServerShutdown(engine, drain, connections, config.drain_timeout),
            keys,
        )
        found = names.loaded, names.catalog
        tell_summary(start_summary(engine.config, config, engine.model_info, *found))
        warn_of_open_server(config)
        if told := keys.describe():
            logger.info("%s", told)
        with contextlib.closing(listeners):
            async with (
                bounded_warnings(),
                throughput_lines(engine, engine.config.log),
                _metrics_port(page, config, connections, listeners.metrics),
            ):
                await server.serve(sockets=[listeners.api])
    finally:
        await engine.shutdown()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)


def _metrics_port(
    page: MetricsPage,
    config: ServerConfig,
    connections: Connections,
    listener: socket.socket | None,
) -> AbstractAsyncContextManager[None]:
    """--metrics-port, while the server runs; nothing without it. Its connections count, too."""
    if listener is None:
        return contextlib.nullcontext()
    app = metrics_app(page, AllowedHosts(config, config.metrics_host))
    return second_port.serving(http_config(app, config, connections), listener)
