"""What the run asks of every engine, ours included: install, prepare, launch, and say what not.

A deployment is the same for all; each engine's file says how to set it up there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from benchmarks.peers.environment import Environment
from lora_serve.bench.client import JsonObject

MODEL_NAME = "base"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """What is served. quantization: "" for bf16 as the checkpoint has it, or "int8", or "int4"."""

    checkpoint: Path
    adapters: Mapping[str, Path] = field(default_factory=dict)
    quantization: str = ""
    quantize_activations: bool = False
    max_running: int = 8
    max_model_len: int = 2048
    num_threads: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A server's command. adapter_fields: what asks for an adapter, where it is not `model`."""

    command: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    ready_path: str = "/health"
    adapter_fields: Mapping[str, JsonObject] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What an engine cannot do, each with the reason that the table gives for it; else empty."""

    batching: str = ""
    adapter_batching: str = ""
    adapters: str = ""
    many_adapters: str = ""
    int8: str = ""
    int4: str = ""


def version_of(checkpoint: Path) -> str:
    """Short, and another one for another model or adapter; for names of what was made from it."""
    return hashlib.sha256((checkpoint / "recipe").read_bytes()).hexdigest()[:8]


class Peer(Protocol):
    """An engine to measure.

    name: as it is chosen and shown. recipe: what is installed. notes: what a reader must know.
    """

    name: str
    recipe: str
    notes: str
    limits: Limits

    def install(self, environment: Environment) -> None:
        """Fill a new environment. Raises InstallError."""

    def prepare(self, environment: Environment, deployment: Deployment) -> None:
        """Convert what the engine cannot read as it is; kept in the environment for next time."""

    def launch(self, environment: Environment, deployment: Deployment, port: int) -> Launch:
        """How to serve the deployment on this machine."""
