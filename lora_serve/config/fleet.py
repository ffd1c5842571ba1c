"""Replicas of one server, on Ray Serve."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.config.setting import require_at_least, require_choices, setting
from lora_serve.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """How many engines answer, and which of them gets a request."""

    replicas: int | None = setting(
        "Engines that run side by side on this machine, as replicas on Ray Serve; by default one, "
        "without Ray. Needs the extra fleet.",
        None,
    )
    max_replicas: int | None = setting(
        "Most replicas: depending on the load, between --replicas and this many run. --replicas if "
        "left out.",
        None,
    )
    target_ongoing_requests: float = setting(
        "Add a replica while each has more requests than this, running and waiting.", 16.0
    )
    routing_policy: str = setting(
        "Which replica gets a request: one that has its adapter and the beginning of its prompt, "
        "unless it is too busy; each in turn; or the one with the fewest requests.",
        "affinity",
        choices=("affinity", "round-robin", "least-loaded"),
    )
    num_ingresses: int = setting(
        "Processes on a Ray cluster that accept requests and choose replicas; with --replicas, the "
        "server's own process does both.",
        1,
    )

    def __post_init__(self) -> None:
        require_choices(self)
        require_at_least(1, "--replicas", self.replicas)
        require_at_least(1, "--num-ingresses", self.num_ingresses)
        if not self.target_ongoing_requests > 0:
            raise ConfigError(
                f"--target-ongoing-requests {self.target_ongoing_requests} must be above 0"
            )
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ConfigError(
                f"--max-replicas {self.max_replicas} is below the {self.min_replicas} of "
                "--replicas; raise it, or leave it out"
            )

    @property
    def min_replicas(self) -> int:
        return self.replicas or 1

    @property
    def scales(self) -> bool:
        """Whether the number of replicas follows the load."""
        return (self.max_replicas or self.min_replicas) > self.min_replicas
