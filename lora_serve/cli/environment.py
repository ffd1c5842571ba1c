"""What `serve` takes from the environment: secrets that must not stand in argv, vLLM's variables.

The only place that reads it. A variable that is set but empty counts as a mistake, not as unset.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import replace

from lora_serve.config import ServerConfig
from lora_serve.errors import ConfigError

API_KEY_VARIABLES = ("LORA_SERVE_API_KEY", "VLLM_API_KEY")
ADMIN_API_KEY_VARIABLE = "LORA_SERVE_ADMIN_API_KEY"
RUNTIME_LORA_VARIABLE = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
RESOLVER_DIRECTORY_VARIABLE = "VLLM_LORA_RESOLVER_CACHE_DIR"  # --lora-resolver dir:…
RESOLVER_REPOS_VARIABLE = "VLLM_LORA_RESOLVER_HF_REPO_LIST"
PLUGINS_VARIABLE = "VLLM_PLUGINS"
DIRECTORY_PLUGIN, HUB_PLUGIN = "lora_filesystem_resolver", "lora_hf_hub_resolver"
TRACES_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
TRACES_PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
READY_TIMEOUT_VARIABLE = "VLLM_ENGINE_READY_TIMEOUT_S"  # --engine-ready-timeout


def with_environment(config: ServerConfig, environ: Mapping[str, str]) -> ServerConfig:
    """`config` with the keys and the permission that `environ` adds.

    Raises:
        ConfigError: naming a variable that is set and holds nothing.
    """
    api = tuple(_secret(environ, name) for name in API_KEY_VARIABLES if name in environ)
    admin = (_secret(environ, ADMIN_API_KEY_VARIABLE),) if ADMIN_API_KEY_VARIABLE in environ else ()
    return replace(
        config,
        otlp_traces_endpoint=config.otlp_traces_endpoint or environ.get(TRACES_VARIABLE) or None,
        otlp_traces_protocol=config.otlp_traces_protocol
        or environ.get(TRACES_PROTOCOL_VARIABLE)
        or None,
        api_key=(*config.api_key, *api),
        admin_api_key=(*config.admin_api_key, *admin),
        allow_runtime_lora_updating=config.allow_runtime_lora_updating or _allows_updating(environ),
    )


def with_settings(args: argparse.Namespace, environ: Mapping[str, str]) -> argparse.Namespace:
    """`args` with the settings that `environ` has and no flag gives.

    Raises:
        ConfigError: naming a variable whose value cannot be.
    """
    settings: dict[str, object] = {}
    if READY_TIMEOUT_VARIABLE in environ:
        settings["engine_ready_timeout"] = _seconds(environ, READY_TIMEOUT_VARIABLE)
    if "enable_lora" in args and "lora_resolver" not in args:
        if _resolves(environ, HUB_PLUGIN, RESOLVER_REPOS_VARIABLE):
            raise ConfigError(
                f"{RESOLVER_REPOS_VARIABLE}={environ[RESOLVER_REPOS_VARIABLE]} is vLLM's way to "
                "name adapters inside repositories of the hub, which this server does not have; "
                "unset it. --lora-resolver hf --lora-allow-hub loads adapters that are "
                "repositories of their own, dir:PATH those that were downloaded"
            )
        if _resolves(environ, DIRECTORY_PLUGIN, RESOLVER_DIRECTORY_VARIABLE):
            settings["lora_resolver"] = (f"dir:{environ[RESOLVER_DIRECTORY_VARIABLE]}",)
    return argparse.Namespace(**{**settings, **vars(args)})


def _resolves(environ: Mapping[str, str], plugin: str, variable: str) -> bool:
    """Whether this plugin of vLLM's would look for adapters where this variable says."""
    plugins = environ.get(PLUGINS_VARIABLE)
    is_chosen = plugins is None or plugin in [name.strip() for name in plugins.split(",")]
    return is_chosen and bool(environ.get(variable)) and _allows_updating(environ)


def _allows_updating(environ: Mapping[str, str]) -> bool:
    return environ.get(RUNTIME_LORA_VARIABLE, "").strip().lower() in ("1", "true")


def _seconds(environ: Mapping[str, str], name: str) -> float:
    try:
        seconds = float(environ[name])
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise ConfigError(
            f"{name} is {environ[name]!r}, and no number of seconds; unset it, or give it one, "
            "such as 600 (0 for never)"
        )
    return seconds


def _secret(environ: Mapping[str, str], name: str) -> str:
    value = environ[name].strip()
    if not value:
        raise ConfigError(f"{name} is set, but empty; unset it, or give it a key")
    return value
