"""Where KV lives beyond the device cache, as flags or as JSON in vLLM's form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lora_serve.config.json_settings import read_json, take_in_json
from lora_serve.config.setting import read_quantities, require_at_least, require_choices, setting
from lora_serve.errors import ConfigError

KV_STORE_POLICIES = ("all", "prompt-only", "after-n-hits")
KV_LOAD_FAILURE_POLICIES = ("recompute", "fail")
KV_ROLES = ("kv_both", "kv_producer", "kv_consumer")
KV_CONNECTOR = "TieredConnector"  # what --kv-transfer-config may call it


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTierConfig:
    """Where KV lives beyond the device cache. No tier is used unless it is named here."""

    kv_ram_bytes: int | None = setting(
        "Keep KV in this much memory after it has left the device cache.", None, quantity="bytes"
    )
    kv_disk_path: str | None = setting(
        "Keep KV in this directory, across restarts; several servers may share it.",
        None,
        metavar="DIR",
    )
    kv_disk_bytes: int = setting("Most KV below --kv-disk-path.", 16 * 2**30, quantity="bytes")
    kv_redis_url: str | None = setting(
        "Keep KV in this Redis or Valkey, which replicas share, as in redis://host:6379/0.",
        None,
        metavar="URL",
        is_secret=True,  # it may have a password
    )
    kv_redis_password_file: str | None = setting(
        "A file with the password of --kv-redis-url, for the server's user alone to read; else "
        "LORA_SERVE_KV_REDIS_PASSWORD in the environment is taken.",
        None,
        metavar="FILE",
    )
    kv_mac_key_file: str | None = setting(
        "A file with keys, one a line in hexadecimal (openssl rand -hex 32): KV on the disk and "
        "in Redis is signed with the first, and taken only if one of them has signed it.",
        None,
        metavar="FILE",
    )
    kv_store_policy: str = setting(
        "Which KV is stored in the tiers: all, only that of prompts, or what requests asked for "
        "again.",
        "all",
        choices=KV_STORE_POLICIES,
    )
    kv_store_min_hits: int = setting(
        "With after-n-hits: how often KV must be asked for again before it is stored.", 1
    )
    kv_load_deadline_ms: int = setting(
        "Longest wait for KV from the tiers, in milliseconds; then it is recomputed.", 1000
    )
    kv_load_failure_policy: str = setting(
        "When a tier has KV but cannot give it: recompute it, or fail the request.",
        "recompute",
        choices=KV_LOAD_FAILURE_POLICIES,
    )
    kv_role: str = setting(
        "What this server does with the tiers: store and fetch, only store what it computes "
        "(kv_producer), or only fetch what others computed (kv_consumer).",
        "kv_both",
        choices=KV_ROLES,
    )
    kv_save_deadline_ms: int = setting(
        "Longest that an answer to do_remote_decode waits until its prompt's KV is stored, in "
        "milliseconds.",
        5000,
    )
    kv_stale_version_seconds: int = setting(
        "Seconds for which the tiers keep an adapter's KV of other versions than the one that was "
        "loaded last, counted from that load; 0 drops it at once.",
        24 * 3600,
    )
    kv_transfer_config: str | Mapping[str, object] | None = setting(
        "The settings above as JSON in vLLM's form, with kv_connector, kv_role and "
        "kv_connector_extra_config.",
        None,
        metavar="JSON",
    )

    def __post_init__(self) -> None:
        take_in_json(self, "kv_transfer_config", read=_transfer_settings)
        read_quantities(self)
        require_at_least(1, "--kv-ram-bytes", self.kv_ram_bytes)
        require_at_least(1, "--kv-disk-bytes", self.kv_disk_bytes)
        require_at_least(1, "--kv-store-min-hits", self.kv_store_min_hits)
        require_at_least(1, "--kv-load-deadline-ms", self.kv_load_deadline_ms)
        require_at_least(1, "--kv-save-deadline-ms", self.kv_save_deadline_ms)
        require_at_least(0, "--kv-stale-version-seconds", self.kv_stale_version_seconds)
        require_choices(self)

    @property
    def is_shared(self) -> bool:
        """Whether other servers can find KV in one of the tiers that these settings name."""
        return bool(self.kv_disk_path or self.kv_redis_url)


def _transfer_settings(text: str | Mapping[str, object], flag: str) -> Mapping[str, object]:
    """The settings of vLLM-style JSON. Raises ConfigError for what is not supported here."""
    given = dict(read_json(text, flag))
    settings = given.pop("kv_connector_extra_config", {})
    if not isinstance(settings, Mapping):
        raise ConfigError(
            f"{flag}: kv_connector_extra_config {settings!r:.80} must be a JSON object"
        )
    if given.pop("kv_connector", KV_CONNECTOR) != KV_CONNECTOR:
        raise ConfigError(f'{flag}: kv_connector must be "{KV_CONNECTOR}"')
    given.pop("engine_id", None)  # KV is found by what shaped it, whoever computed it
    return {**settings, **given}
