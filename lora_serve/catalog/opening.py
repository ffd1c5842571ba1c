"""Opens the store that the settings name. Redis's client library is an extra."""

from __future__ import annotations

import logging
from pathlib import Path

from lora_serve.catalog.base import CatalogStore
from lora_serve.config import CatalogConfig
from lora_serve.errors import CatalogUnavailableError, ConfigError

logger = logging.getLogger(__name__)

PASSWORD_VARIABLE = "LORA_SERVE_LORA_CATALOG_PASSWORD"


def open_store(config: CatalogConfig) -> CatalogStore:
    """The store; one that cannot be reached may come later.

    Raises:
        ConfigError: there can be none of this kind here.
    """
    assert config.lora_catalog, "a catalog is named"
    if not config.is_url:
        from lora_serve.catalog.file_store import FileStore

        return FileStore(Path(config.lora_catalog).expanduser())
    try:
        from lora_serve.catalog.redis_store import RedisStore
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--lora-catalog needs Redis's client library: pip install 'lora-serve[redis]'"
        ) from error
    from lora_serve.kv_tiers.secret_files import redis_password

    password = redis_password(
        config.lora_catalog_password_file, "--lora-catalog-password-file", PASSWORD_VARIABLE
    )
    return RedisStore(config.lora_catalog, config.lora_catalog_name, password)


def check_catalog(config: CatalogConfig) -> None:
    """Refuse what can never work; warn of a store that does not answer, which may come later."""
    if not config.lora_catalog:
        return
    store = open_store(config)
    try:
        store.ping()
    except CatalogUnavailableError as error:
        logger.warning(
            "%s; the server starts, and serves adapters as soon as the catalog answers", error
        )
    finally:
        store.close()
