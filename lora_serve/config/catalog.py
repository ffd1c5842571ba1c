"""Where servers agree on what adapters' names stand for."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.config.setting import require_at_least, setting
from lora_serve.errors import ConfigError

URL_SCHEMES = ("redis://", "rediss://", "unix://")


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogConfig:
    """The adapter catalog. Without it each server knows its own adapters alone."""

    lora_catalog: str | None = setting(
        "Keep what adapters' names stand for in this file, for all servers of this machine and "
        "across restarts; or in this Redis or Valkey, for many machines. A load on one server is a "
        "load on all.",
        None,
        metavar="PATH|URL",
        is_secret=True,  # it may have a password
    )
    lora_catalog_name: str = setting(
        "Name of the catalog in that Redis; servers of another model need another one.",
        "default",
        metavar="NAME",
    )
    lora_catalog_password_file: str | None = setting(
        "A file with the password of that Redis, for the server's user alone to read; else "
        "LORA_SERVE_LORA_CATALOG_PASSWORD in the environment is taken.",
        None,
        metavar="FILE",
    )
    lora_replica_id: str | None = setting(
        "Name of this server in the catalog; a later server with the same id replaces it. This "
        "machine's name and the port, or Unix socket, if left out.",
        None,
        metavar="NAME",
    )
    lora_replica_address: str | None = setting(
        "Address at which others reach this server, shown in the catalog; its machine's name and "
        "port, or Unix socket, if left out.",
        None,
        metavar="URL",
    )
    lora_rollout_timeout: float = setting(
        "Seconds that a call that changes an adapter waits for all replicas; then it names those "
        "that have not made the change.",
        150.0,
        metavar="SECONDS",
    )

    def __post_init__(self) -> None:
        require_at_least(0, "--lora-rollout-timeout", self.lora_rollout_timeout)
        if not (self.lora_catalog_name.isprintable() and self.lora_catalog_name):
            raise ConfigError("--lora-catalog-name must be printable, and not empty")
        if self.lora_replica_id == "":
            raise ConfigError("--lora-replica-id is empty; leave it out, or name this server")
        where = self.lora_catalog or ""
        if "://" in where and not where.startswith(URL_SCHEMES):
            raise ConfigError(
                f"--lora-catalog {where.partition('://')[0]}://…: must be a path, or a URL of "
                f"{', '.join(URL_SCHEMES)}"
            )

    @property
    def is_url(self) -> bool:
        return bool(self.lora_catalog and self.lora_catalog.startswith(URL_SCHEMES))
