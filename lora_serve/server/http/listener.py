"""What a server can know to be wrong before it has a model: its address and its chat template."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

from lora_serve.config import ServerConfig
from lora_serve.errors import ConfigError


def open_listener(config: ServerConfig) -> socket.socket:
    """The server's address, bound but not listening: who connects before the model is there fails.

    Raises:
        ConfigError: the address cannot be had, or --chat-template cannot be used.
    """
    template = read_template(config.chat_template)
    if template is not None:
        from lora_serve.text.chat_template import check_template  # slow to import

        check_template(template)
    return _bind(config.host, config.port)


def read_template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--chat-template {path} cannot be read: {error}") from error


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            stack.pop_all()  # bound: now it is the caller's to close
    except OSError as error:
        raise ConfigError(
            f"cannot listen on --host {host} --port {port}: {error.strerror}"
        ) from error
    return listener
