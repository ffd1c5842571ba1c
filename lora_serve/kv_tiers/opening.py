"""Opens the tiers that the settings name, in the order in which they are asked."""

from __future__ import annotations

from collections.abc import Callable

from lora_serve.config import KVTierConfig
from lora_serve.config.refusals import Refusals
from lora_serve.errors import ConfigError
from lora_serve.kv_tiers.base import Tier
from lora_serve.kv_tiers.kinds import TIER_KINDS
from lora_serve.kv_tiers.mac import MacKeys, read_mac_keys
from lora_serve.kv_tiers.store import TieredStore


def open_store(config: KVTierConfig, notify: Callable[[], None]) -> TieredStore | None:
    """The store of the settings' tiers; None if they name none.

    `notify` is called from other threads whenever results can be taken.

    Raises:
        ConfigError: a tier can never work as named. One that cannot be used now is no error.
    """
    keys = read_mac_keys(config.kv_mac_key_file)
    tiers = open_tiers(config, keys)
    return TieredStore(tiers, notify, keys=keys) if tiers else None


def check_tiers(config: KVTierConfig) -> None:
    """Refuse tiers and key files that can never work as named, and a directory of no use.

    The directory is made if it is not there, as it would be later.

    Raises:
        ConfigError: naming the setting.
    """
    refusals = Refusals()
    keys = MacKeys()
    with refusals.noted():
        _check_role(config)
    with refusals.noted():
        keys = read_mac_keys(config.kv_mac_key_file)
    for kind in TIER_KINDS:
        if kind.is_named(config):
            with refusals.noted():
                kind.check(config, keys)
    refusals.raise_noted()


def _check_role(config: KVTierConfig) -> None:
    """Raise ConfigError for a role that no tier shares with another server."""
    if config.kv_role != "kv_both" and not config.is_shared:
        raise ConfigError(
            f"--kv-role {config.kv_role}: no tier is named that other servers look into; give "
            "--kv-disk-path or --kv-redis-url, too"
        )


def open_tiers(config: KVTierConfig, keys: MacKeys) -> list[Tier]:
    """`keys`: whose records are accepted from where others may write."""
    return [kind.open(config, keys) for kind in TIER_KINDS if kind.is_named(config)]
