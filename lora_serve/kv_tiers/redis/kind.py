"""Redis among the kinds of tiers. Its client library is an extra, imported when it is needed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lora_serve.config import KVTierConfig
from lora_serve.errors import ConfigError
from lora_serve.kv_tiers.base import TierError
from lora_serve.kv_tiers.inspection import Inspection
from lora_serve.kv_tiers.kind import InspectedPlace, TierKind
from lora_serve.kv_tiers.mac import MacKeys
from lora_serve.kv_tiers.secret_files import redis_password

if TYPE_CHECKING:
    from lora_serve.kv_tiers.redis.tier import RedisTier

logger = logging.getLogger(__name__)

SCHEMES = ("redis://", "rediss://", "unix://")


def _check(config: KVTierConfig, keys: MacKeys) -> None:
    """Refuse what can never work; warn of a server that does not answer, which may come later."""
    tier = _open(config, keys)
    try:
        tier.ping()
    except TierError as error:
        logger.warning(
            "the Redis of --kv-redis-url does not answer (%s); the server starts without its KV, "
            "and uses it as soon as it answers",
            error,
        )
    finally:
        tier.close()


def _open(config: KVTierConfig, keys: MacKeys) -> RedisTier:
    try:
        from lora_serve.kv_tiers.redis.tier import RedisTier
    except ModuleNotFoundError as error:
        raise _no_library("--kv-redis-url") from error
    assert config.kv_redis_url, "a Redis tier is named"
    password = redis_password(config.kv_redis_password_file)
    timeout_seconds = config.kv_load_deadline_ms / 1000
    return RedisTier(config.kv_redis_url, timeout_seconds, password=password, keys=keys)


def _inspect(place: InspectedPlace) -> Inspection | None:
    if not place.where.startswith(SCHEMES):
        return None
    try:
        from lora_serve.kv_tiers.redis.inspection import RedisInspection
    except ModuleNotFoundError as error:
        raise _no_library(place.where) from error
    return RedisInspection(place.where, redis_password(place.password_file), place.keys)


def _no_library(what: str) -> ConfigError:
    return ConfigError(f"{what} needs Redis's client library: pip install 'lora-serve[redis]'")


KIND = TierKind(
    name="redis",
    is_named=lambda config: bool(config.kv_redis_url),
    check=_check,
    open=_open,
    inspect=_inspect,
    places=f"a URL of {', '.join(SCHEMES)}",
)
