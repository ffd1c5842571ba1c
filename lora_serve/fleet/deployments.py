"""The fleet as a Ray Serve application: replicas, and ingresses that choose among them.

What is sent to a replica comes back as `Fleet` of `ingress.py` says; Ray's own errors end here.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, WorkerCrashedError
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import ReplicaID
from starlette.types import ASGIApp

from lora_serve.config import CatalogConfig, EngineConfig, FleetConfig, ServerConfig
from lora_serve.fleet.ingress import ingress_app
from lora_serve.fleet.lost_replicas import is_gone
from lora_serve.fleet.messages import AnswerHead, ReplicaLostError, RequestHead, WholeAnswer
from lora_serve.fleet.replica import Replica
from lora_serve.fleet.routing import RoutingRequest
from lora_serve.observability.log import set_up_logging
from lora_serve.server.http.auth import KeyRing

APPLICATION = "lora-serve"
REPLICA, INGRESS = "replica", "ingress"
ROUTER = "lora_serve.fleet.request_router.FleetRequestRouter"
NAMESPACE = "serve"  # in which Ray Serve names its replicas' actors
REPORT_SECONDS = 1.0
# Replicas bound and refuse what they are sent as one server does; Ray Serve is to pass on all.
MAX_ONGOING = 100_000
LAST_WORDS_SECONDS = 5.0  # after the drain, for an engine to end

# How the last line of what Python prints of an exception begins.
_ERROR = re.compile(r"^[\w.]*(?:Error|Exception): ", re.MULTILINE)

_deployment: Any = serve.deployment  # typed as what decorates a class with `@`

LOST = (
    RayActorError,
    WorkerCrashedError,
    ReplicaUnavailableError,
    DeploymentUnavailableError,
)


class FleetReplica:
    """Ray Serve's side of a `Replica`."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, engine: EngineConfig, server: ServerConfig, catalog: CatalogConfig
    ) -> None:
        set_up_logging(engine.log, "replica")
        replica_id = serve.get_replica_context().replica_id
        run = catalog.lora_replica_id or _cluster()
        catalog = replace(catalog, lora_replica_id=f"{run}/{replica_id.to_full_id_str()}")
        has_ended = partial(is_gone, run, is_running)
        self._replica = await Replica.start(
            replica_id.unique_id, engine, server, catalog, has_ended
        )

    async def answer(
        self, routing: RoutingRequest, head: RequestHead, body: bytes
    ) -> AsyncGenerator[str | AnswerHead | bytes, None]:
        """routing: read by the request router alone."""
        async for part in self._replica.answer(head, body):
            yield part

    async def answer_whole(self, head: RequestHead, body: bytes) -> WholeAnswer:
        return await self._replica.answer_whole(head, body)

    async def reload_keys(self) -> None:
        self._replica.reload_keys()

    async def reconfigure(self, user_config: object) -> None:
        """Ray Serve calls it when the deployment's user_config was changed."""
        await self.reload_keys()

    async def record_routing_stats(self) -> dict[str, Any]:
        return {**await self._replica.stats()}

    async def __del__(self) -> None:
        if hasattr(self, "_replica"):  # else it has not come so far
            await self._replica.close()


class FleetIngress:
    """Ray Serve's side of an ingress."""

    def __init__(
        self,
        replicas: DeploymentHandle[Any],
        engine: EngineConfig,
        server: ServerConfig,
        has_catalog: bool,
    ) -> None:
        set_up_logging(engine.log, "ingress")
        self._keys = KeyRing(server)
        fleet = RayFleet(replicas)
        self._app = ingress_app(fleet, engine, server, self._keys, has_catalog=has_catalog)

    def reconfigure(self, user_config: object) -> None:
        """The same as of a replica."""
        self._keys.reload_or_keep()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app


def why_not_started() -> str:
    """What the replica has said that could not be started."""
    application = serve.status().applications.get(APPLICATION)
    told = application.deployments[REPLICA].message if application is not None else ""
    begins = [*_ERROR.finditer(told)]
    return told[begins[-1].end() :].strip() if begins else told


class RayFleet:
    """A `Fleet` whose replicas Ray Serve runs."""

    def __init__(self, replicas: DeploymentHandle[Any]) -> None:
        self._replicas = replicas
        self._streams: Any = replicas.options(method_name="answer", stream=True)

    async def answer(
        self, routing: RoutingRequest, head: RequestHead, body: bytes
    ) -> AsyncGenerator[str | AnswerHead | bytes, None]:
        parts = self._streams.remote(routing, head, body)
        has_ended = False
        try:
            async for part in parts:
                yield part
            has_ended = True
        except LOST as error:
            has_ended = True
            raise ReplicaLostError(str(error).partition("\n")[0]) from error
        finally:
            if not has_ended:
                parts.cancel()

    async def reload_keys(self) -> None:
        """Have every replica read its key files again."""
        await self._replicas.broadcast("reload_keys").results_async(return_exceptions=True)

    async def ask_all(self, head: RequestHead, body: bytes) -> list[WholeAnswer]:
        asked = self._replicas.broadcast("answer_whole", head, body)
        try:
            answers = await asked.results_async(return_exceptions=True)
        except LOST as error:
            raise ReplicaLostError(str(error).partition("\n")[0]) from error
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, LOST):
                raise answer
        whole = [answer for answer in answers if isinstance(answer, WholeAnswer)]
        if not whole:
            raise ReplicaLostError("every replica was lost while it answered")
        return whole


def is_running(actor: str) -> bool:
    """Whether Ray has this actor, or may have it.

    Ray gives a name back when the process that had it is known to be dead.
    """
    try:
        ray.get_actor(actor, namespace=NAMESPACE)
    except ValueError:
        return not ReplicaID.is_full_id_str(actor)
    return True


def _cluster() -> str:
    return str(ray.get_runtime_context().gcs_address)


def replicas_of(
    engine: EngineConfig,
    server: ServerConfig,
    fleet: FleetConfig,
    catalog: CatalogConfig,
    *,
    is_alone: bool,
    gives_up_at_once: bool = False,
) -> serve.Application:
    """The replicas.

    Args:
        is_alone: one process alone will send them requests.
        gives_up_at_once: when the first one cannot be started, instead of trying again.
    """
    options: dict[str, Any] = {"num_replicas": fleet.min_replicas}
    if fleet.scales:
        options = {
            "autoscaling_config": {
                "min_replicas": fleet.min_replicas,
                "max_replicas": fleet.max_replicas,
                "target_ongoing_requests": fleet.target_ongoing_requests,
            }
        }
    if gives_up_at_once:
        options["max_constructor_retry_count"] = 1
    deployment = _deployment(FleetReplica).options(
        name=REPLICA,
        ray_actor_options=reserved(engine),
        request_router_config={
            "request_router_class": ROUTER,
            "request_router_kwargs": {"policy": fleet.routing_policy, "is_alone": is_alone},
            "request_routing_stats_period_s": REPORT_SECONDS,
        },
        **_endings(server),
        **options,
    )
    return deployment.bind(engine, server, catalog)  # type: ignore[no-any-return]


def application(
    engine: EngineConfig, server: ServerConfig, fleet: FleetConfig, catalog: CatalogConfig
) -> serve.Application:
    """Replicas behind ingresses that Ray Serve's HTTP proxies reach."""
    ingress = _deployment(serve.ingress()(FleetIngress)).options(
        name=INGRESS, num_replicas=fleet.num_ingresses, **_endings(server)
    )
    replicas = replicas_of(engine, server, fleet, catalog, is_alone=fleet.num_ingresses == 1)
    has_catalog = bool(catalog.lora_catalog) or not (fleet.scales or fleet.min_replicas > 1)
    return ingress.bind(replicas, engine, server, has_catalog)  # type: ignore[no-any-return]


def _endings(server: ServerConfig) -> dict[str, Any]:
    """How a process is asked to end: once it has answered what it has begun."""
    return {
        "max_ongoing_requests": MAX_ONGOING,
        "graceful_shutdown_wait_loop_s": 0.2,
        "graceful_shutdown_timeout_s": server.drain_timeout + LAST_WORDS_SECONDS,
    }


def reserved(engine: EngineConfig) -> dict[str, int]:
    """What Ray reserves for a replica; it has no part in what the engine takes."""
    if engine.model.device == "cuda":
        return {"num_cpus": 1, "num_gpus": engine.parallel.tensor_parallel_size}
    threads = engine.model.cpu_threads or 1
    return {"num_cpus": threads * engine.parallel.tensor_parallel_size}
