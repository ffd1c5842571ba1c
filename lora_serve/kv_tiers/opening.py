"""Opens the tiers that the settings name, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lora_serve.config import KVTierConfig
from lora_serve.config.refusals import Refusals
from lora_serve.errors import ConfigError
from lora_serve.kv_tiers.base import Tier
from lora_serve.kv_tiers.disk.directory import check_writable
from lora_serve.kv_tiers.disk.tier import DiskTier
from lora_serve.kv_tiers.mac import MacKeys, read_mac_keys
from lora_serve.kv_tiers.ram import RamTier
from lora_serve.kv_tiers.secret_files import redis_password
from lora_serve.kv_tiers.store import TieredStore


def open_store(config: KVTierConfig, notify: Callable[[], None]) -> TieredStore | None:
    """The store of the settings' tiers; None if they name none.

    `notify` is called from other threads whenever results can be taken.

    Raises:
        ConfigError: a tier can never work as named. One that cannot be used now is no error.
    """
    config = config.expanded()
    keys = read_mac_keys(config.kv_mac_key_file)
    tiers = open_tiers(config, keys)
    return TieredStore(tiers, notify, keys=keys) if tiers else None


def check_tiers(config: KVTierConfig) -> None:
    """Refuse tiers and key files that can never work as named, and a directory of no use.

    The directory is made if it is not there, as it would be later.

    Raises:
        ConfigError: naming the setting.
    """
    config = config.expanded()
    refusals = Refusals()
    keys = MacKeys()
    with refusals.noted():
        keys = read_mac_keys(config.kv_mac_key_file)
    if config.kv_disk_path:
        with refusals.noted():
            check_writable(Path(config.kv_disk_path))
    if config.kv_redis_url:
        with refusals.noted():
            _redis_tier(config.kv_redis_url, config, keys).close()
    refusals.raise_noted()


def open_tiers(config: KVTierConfig, keys: MacKeys) -> list[Tier]:
    """`keys`: whose records are accepted from where others may write."""
    tiers: list[Tier] = []
    if config.kv_ram_bytes:
        tiers.append(RamTier(config.kv_ram_bytes))
    if config.kv_disk_path:
        tiers.append(DiskTier(Path(config.kv_disk_path), config.kv_disk_bytes, keys=keys))
    if config.kv_redis_url:
        tiers.append(_redis_tier(config.kv_redis_url, config, keys))
    return tiers


def _redis_tier(url: str, config: KVTierConfig, keys: MacKeys) -> Tier:
    try:
        from lora_serve.kv_tiers.redis.tier import RedisTier  # its client library is an extra
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--kv-redis-url needs Redis's client library: pip install 'lora-serve[redis]'"
        ) from error
    password = redis_password(config.kv_redis_password_file)
    return RedisTier(url, config.kv_load_deadline_ms / 1000, password=password, keys=keys)
