"""Replicas on this machine alone: a Ray of their own, and one address before them all.

The server's own process listens, chooses replicas and passes on; it loads no model. So its limits
on connections, its TLS and its end are those of the server without replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from lora_serve.config import CatalogConfig, EngineConfig, FleetConfig, ServerConfig
from lora_serve.engine.frontend.rank_checks import (
    check_ranks,
    has_gpu_driver,
    warn_of_shared_cores,
)
from lora_serve.errors import ConfigError
from lora_serve.fleet.ingress import ingress_app
from lora_serve.fleet.lost_replicas import run_of
from lora_serve.fleet.ray_home import RayHome
from lora_serve.ops.cpu.numa import AUTO
from lora_serve.ops.cpu.threads import default_num_threads
from lora_serve.private_directory import PrivateDirectory
from lora_serve.server.adapter_names.opening import member_of
from lora_serve.server.http.auth import KeyRing
from lora_serve.server.http.connections import Connections
from lora_serve.server.http.drain import Drain, Draining
from lora_serve.server.http.listener import Listeners
from lora_serve.server.http.serving import SignalledServer, http_config, warn_of_open_server
from lora_serve.server.http.shutdown import ServerShutdown
from lora_serve.server.routes import STATE_PATHS

if TYPE_CHECKING:
    from lora_serve.fleet.deployments import RayFleet

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 128 * 2**20  # for bodies on their way; those below 100 KB need none
_PREFIX = "lora-serve-fleet-"
# Read when Ray is imported. Its deduplication drops lines of one replica that differ from another's
# in numbers alone, the audit's among them. It runs its workers at a niceness of 15, where replicas
# would stand behind all else on the machine, the process that listens for them included.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_worker_niceness": "0",
}
# They tell of what is not the user's to change here.
_QUIET_LOGGERS = ("ray.serve", "ray._private.authentication")


def check_fleet(engine: EngineConfig, server: ServerConfig, fleet: FleetConfig) -> None:
    """Raise ConfigError for what a fleet on this machine cannot do, or without Ray."""
    if server.metrics_port is not None:
        raise ConfigError(
            "--metrics-port does not go with --replicas; read /metrics on the port of the server, "
            "which has a label for each replica"
        )
    if engine.kv_events.kv_events_enable_kv_cache_events:
        raise ConfigError(
            "--kv-events-config does not go with --replicas, which would all publish at one "
            "address; start servers of their own instead"
        )
    check_ranks(engine)
    _check_ranks(engine, fleet)
    warn_of_shared_cores(engine, _most_replicas(fleet))
    _import_ray()


def serve_replicas(
    engine: EngineConfig,
    server: ServerConfig,
    fleet: FleetConfig,
    catalog: CatalogConfig,
    listeners: Listeners,
) -> None:
    """Serve until SIGTERM or SIGINT, as `run_server` does.

    Without a --lora-catalog the replicas have one of their own, which ends with them.

    Raises:
        ConfigError: the replicas cannot be started.
    """
    engine = shared_out(placed(engine), fleet)
    run = run_of(member_of(server, catalog).replica_id)
    with (
        _own_unless_named(replace(catalog, lora_replica_id=run), engine) as catalog,
        local_replicas(engine, server, fleet, catalog) as replicas,
    ):
        asyncio.run(_serve(replicas, engine, server, listeners))


@contextlib.contextmanager
def _own_unless_named(catalog: CatalogConfig, engine: EngineConfig) -> Iterator[CatalogConfig]:
    if catalog.lora_catalog or not engine.lora.enable_lora:
        yield catalog
        return
    with contextlib.closing(PrivateDirectory(_PREFIX, Path(tempfile.gettempdir()))) as directory:
        yield replace(catalog, lora_catalog=str(directory.path / "catalog"))


@contextlib.contextmanager
def local_replicas(
    engine: EngineConfig, server: ServerConfig, fleet: FleetConfig, catalog: CatalogConfig
) -> Iterator[Any]:
    """A Ray of one's own with these replicas, which all run; the handle that asks them.

    Raises:
        ConfigError: one cannot be started.
    """
    import ray
    from ray import serve

    from lora_serve.fleet.deployments import APPLICATION, replicas_of, why_not_started

    with RayHome() as home:
        try:
            ray.init(
                address="local",
                num_cpus=num_cpus(engine, fleet),
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                _temp_dir=str(home.path),
                logging_level=logging.WARNING,
            )
            serve.start(proxy_location="Disabled")
            application = replicas_of(
                engine, server, fleet, catalog, is_alone=True, gives_up_at_once=True
            )
            try:
                handle = serve.run(application, name=APPLICATION, route_prefix=None)
            except RuntimeError as error:  # which does not say why
                reason = why_not_started()
                home.explains_nothing = not reason
                raise ConfigError(f"the replicas cannot be started: {reason or error}") from error
            yield handle
        finally:
            _end_ray()


def _end_ray() -> None:
    """End Ray Serve, and Ray with it.

    Ray writes of its own calls, which this cuts off, as of failed tasks that it tries again.
    """
    import ray
    from ray import serve
    from ray._private import worker

    print_error = worker.print_to_stdstream  # not what replicas write: that has its own way
    worker.print_to_stdstream = _note_ray_error
    try:
        with contextlib.suppress(Exception):  # what is left of it ends with the next line
            serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
    finally:
        worker.print_to_stdstream = print_error


def _note_ray_error(data: Mapping[str, Any], ignore_prefix: bool) -> None:
    logger.debug("Ray, at the end: %s", " ".join(data["lines"]))


def shared_out(engine: EngineConfig, fleet: FleetConfig) -> EngineConfig:
    """The machine's cores and free memory, divided among the replicas, and cores among ranks."""
    cache, model, replicas = engine.cache, engine.model, _most_replicas(fleet)
    if model.device != "cuda":  # of a GPU each has its own
        share = cache.gpu_memory_utilization / replicas
        cache = replace(cache, gpu_memory_utilization=share)
    if model.cpu_threads is None:
        num_ranks = replicas * engine.parallel.tensor_parallel_size
        model = replace(model, cpu_threads=max(1, default_num_threads() // num_ranks))
    return replace(engine, cache=cache, model=model)


def num_cpus(engine: EngineConfig, fleet: FleetConfig) -> int:
    """What Ray is told to have, so that it starts all replicas with what each reserves."""
    from lora_serve.fleet.deployments import reserved

    return max(4, _most_replicas(fleet) * (1 + reserved(engine)["num_cpus"]))


def placed(engine: EngineConfig) -> EngineConfig:
    """Name the device that auto stands for on this machine, where Ray is to reserve it."""
    if engine.model.device != AUTO or not num_cards():
        return engine
    return replace(engine, model=replace(engine.model, device="cuda"))


def num_cards() -> int:
    """How many GPUs torch sees here. It is imported only where they have a driver."""
    if not has_gpu_driver():
        return 0
    import torch

    return torch.cuda.device_count()


def _most_replicas(fleet: FleetConfig) -> int:
    return fleet.max_replicas or fleet.min_replicas


def _import_ray() -> None:
    """Import Ray for the first time in this process, as one that runs on this machine alone.

    What the user has set in the environment stays. Raises ConfigError without Ray.
    """
    plain = {} if sys.stderr.isatty() else {"RAY_COLOR_PREFIX": "0"}
    for name, value in (_ENVIRONMENT | plain).items():
        os.environ.setdefault(name, value)
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"--replicas needs Ray Serve ({error}): pip install 'lora-serve[fleet]'"
        ) from error
    for name in _QUIET_LOGGERS:  # Ray Serve sets the level of its own when it is imported
        logging.getLogger(name).setLevel(logging.ERROR)


def _check_ranks(engine: EngineConfig, fleet: FleetConfig) -> None:
    if engine.parallel.cpu_ranks == AUTO:
        raise ConfigError(
            "--cpu-ranks auto does not go with --replicas, whose ranks would share the same cores; "
            "start a server on each node instead, under numactl"
        )
    replicas, ranks = _most_replicas(fleet), engine.parallel.tensor_parallel_size
    is_on_cards = placed(engine).model.device == "cuda"
    if ranks == 1 and not is_on_cards:  # which may share a core
        return
    remedy = "lower one of them"
    if is_on_cards:  # as Ray reserves them (deployments.reserved)
        count, place, seen = num_cards(), "GPU", "that torch sees"
        remedy += ", or compute on the processor with --device cpu"
    else:
        count, place, seen = default_num_threads(), "core", "that may be used"
    if replicas * ranks > count:
        raise ConfigError(
            f"{replicas} replicas of --tensor-parallel-size {ranks} are {replicas * ranks} ranks, "
            f"above the {count} {place}{'s' * (count != 1)} {seen}; {remedy}"
        )


async def _serve(
    replicas: Any, engine: EngineConfig, server: ServerConfig, listeners: Listeners
) -> None:
    from lora_serve.fleet.deployments import RayFleet

    listeners.listen()
    fleet, drain = RayFleet(replicas), Drain()
    keys = _KeysOfAll(server, fleet)
    connections = Connections(server, AutoHTTPProtocol)
    app = Draining(ingress_app(fleet, engine, server, keys, has_catalog=True), drain, STATE_PATHS)
    shutdown = ServerShutdown(_NoEngine(), drain, connections, server.drain_timeout)
    warn_of_open_server(server)
    with contextlib.closing(listeners):
        running = SignalledServer(http_config(app, server, connections), shutdown, keys)
        await running.serve(sockets=[listeners.api])


class _KeysOfAll(KeyRing):
    """The server's keys, which its replicas have, too."""

    def __init__(self, server: ServerConfig, fleet: RayFleet) -> None:
        super().__init__(server)
        self._fleet = fleet
        self._telling: asyncio.Task[None] | None = None

    def reload(self) -> None:
        super().reload()
        if hasattr(self, "_fleet"):  # else it is the first time, and replicas read them, too
            self._telling = asyncio.get_running_loop().create_task(self._fleet.reload_keys())


class _NoEngine:
    """What ends with a server that has no engine of its own: nothing."""

    is_paused = False

    async def resume(self) -> None: ...

    async def shutdown(self) -> None: ...
