"""Where replicas compute on a cluster of Ray's: what the device `auto` stands for there.

Ray lets a replica see the GPUs that were reserved for it and no others, so this is decided before
any replica starts, by what all nodes offer.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import click
import ray
from ray._private import services

from lora_serve.config import EngineConfig, FleetConfig
from lora_serve.config.model import AUTO
from lora_serve.errors import ConfigError
from lora_serve.fleet.local import num_cards

CLIENT = "ray://"  # how an address begins behind which Ray's client server listens

logger = logging.getLogger(__name__)


def placed_on_cluster(engine: EngineConfig, fleet: FleetConfig) -> EngineConfig:
    """Name the device that auto stands for: GPUs if the cluster has any, else processors.

    Raises:
        ConfigError: it has some, and too few for all replicas.
    """
    if engine.model.device != AUTO:
        return engine
    gpus, ranks = gpus_of_nodes(), engine.parallel.tensor_parallel_size
    device = "cuda" if any(gpus) else "cpu"
    if any(gpus) and sum(num // ranks for num in gpus) < fleet.min_replicas:
        raise ConfigError(
            f"device auto: {fleet.min_replicas} replicas need {ranks} GPU{'s' * (ranks > 1)} each, "
            f"on one node, and the cluster's nodes have {', '.join(map(str, gpus))}; say "
            "device=cuda to wait for more GPUs, device=cpu to compute on processors, or lower "
            "replicas"
        )
    logger.info("device auto: replicas compute on %s", device)
    return replace(engine, model=replace(engine.model, device=device))


def gpus_of_nodes() -> list[int]:
    """How many GPUs each node of the cluster has.

    `serve run` reads an application before it connects, so the cluster that it will connect to is
    asked. Where none runs yet, it will start Ray on this machine.
    """
    if ray.is_initialized():
        return _gpus_of_nodes()
    address = _address_of_command()
    if not _is_cluster(address):
        return [num_cards()]
    ray.init(address=address, logging_level=logging.WARNING)  # as it says it: tokens depend on it
    try:
        return _gpus_of_nodes()
    finally:
        ray.shutdown()


def _gpus_of_nodes() -> list[int]:
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return [int(node["Resources"].get("GPU", 0)) for node in nodes if node["Alive"]]


def _address_of_command() -> str | None:
    """What `serve run --address` says, which its option takes from RAY_ADDRESS, too."""
    command = click.get_current_context(silent=True)
    return None if command is None else command.params.get("address")


def _is_cluster(address: str | None) -> bool:
    """Whether `ray.init` connects to a cluster with this address, instead of starting one."""
    if address is not None and address.startswith(CLIENT):
        return True
    return services.canonicalize_bootstrap_address(address) is not None  # type: ignore[arg-type]
