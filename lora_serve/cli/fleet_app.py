"""`serve run lora_serve.fleet:app model=… …`: the flags of `serve` as Ray Serve's arguments."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import urlsplit

from lora_serve.cli.arguments import catalog_config
from lora_serve.cli.parser import OneLineParser
from lora_serve.cli.serve import add_arguments
from lora_serve.cli.serve_run import configs, with_demo_model
from lora_serve.errors import ConfigError

if TYPE_CHECKING:
    from ray.serve import Application

DEFAULT_REPLICAS = 2
YES, NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
ELSEWHERE = {  # what an address is for is Ray Serve's business
    "port": "http_options.port",
    "uds": "http_options",
    "metrics_port": "the route /metrics",
    "lora_replica_id": "the ids of replicas",
    "lora_replica_address": "the ids of replicas",
    "ssl_keyfile": "http_options.ssl_keyfile",
    "ssl_certfile": "http_options.ssl_certfile",
    "ssl_ca_certs": "http_options.ssl_ca_certs",
}
# Ray shows an application's arguments to all who may look, and keeps them in its files.
KEYS = {
    "api_key": "api_key_file, or the variable LORA_SERVE_API_KEY",
    "admin_api_key": "admin_api_key_file, or the variable LORA_SERVE_ADMIN_API_KEY",
}
PASSWORDS = {
    "lora_catalog": "lora_catalog_password_file",
    "kv_redis_url": "kv_redis_password_file",
}


def app(args: dict[str, object]) -> Application:
    """Build the application for `serve run` and `serve deploy`.

    Args:
        args: flags of `lora-serve serve` by their names, with _ or - between words, and their
            values: a text, a number, true or false, or a list of these.

    Raises:
        ConfigError: there is no such flag, or it cannot be; or Ray Serve is missing.
    """
    try:
        from lora_serve.fleet.cluster import placed_on_cluster
        from lora_serve.fleet.deployments import application
    except ImportError as error:
        raise ConfigError(f"no Ray Serve ({error}): pip install 'lora-serve[fleet]'") from error
    flags = parsed(args)
    engine, server, fleet = configs(flags)
    if not engine.model.model:
        engine = with_demo_model(engine)
    fleet = replace(fleet, replicas=fleet.replicas or DEFAULT_REPLICAS)
    return application(placed_on_cluster(engine, fleet), server, fleet, catalog_config(flags))


def parsed(args: Mapping[str, object]) -> argparse.Namespace:
    """The arguments as `serve` would have read them. Raises ConfigError, as `app` does."""
    parser = OneLineParser(prog="lora_serve.fleet:app")
    add_arguments(parser)
    parser.error = _refuse  # type: ignore[method-assign]  # Ray Serve's command is not ours to end
    # Proxies take requests from anywhere, whatever address each listens on.
    words = [] if "host" in args else ["--host", "0.0.0.0"]
    for name, value in args.items():
        words += _words(parser, name.replace("_", "-"), value)
    return parser.parse_args(words)


def _refuse(message: str) -> NoReturn:
    raise ConfigError(message)


def _words(parser: argparse.ArgumentParser, name: str, value: object) -> Sequence[str]:
    """An argument as words of a command line."""
    if (known := name.replace("-", "_")) in ELSEWHERE:
        raise ConfigError(f"{name} is not the application's; use {ELSEWHERE[known]} of Ray Serve")
    if known in KEYS:
        raise ConfigError(f"{known} would be shown by Ray's dashboard; use {KEYS[known]}")
    if known in PASSWORDS and urlsplit(str(value)).password:
        raise ConfigError(
            f"{known} has a password, which Ray's dashboard would show; use {PASSWORDS[known]}"
        )
    flag = parser._option_string_actions.get(f"--{name}")
    if flag is not None and flag.nargs == 0:
        text = str(value).lower()
        if text not in (*YES, *NO):
            raise ConfigError(f"{name} must be true or false, got {value!r}")
        if text in YES:
            return [f"--{name}"]
        return [f"--no-{name}"] if f"--no-{name}" in flag.option_strings else []
    values = value if isinstance(value, list | tuple) else [value]
    if flag is not None and flag.nargs == "+":
        return [f"--{name}", *map(str, values)]
    return [f"--{name}={each}" for each in values]
