"""What a server can know to be wrong before it has a model: its address, and files it is given."""

from __future__ import annotations

import contextlib
import socket
import ssl
from pathlib import Path

from lora_serve.config import ServerConfig
from lora_serve.errors import ConfigError


def check_chat_template(config: ServerConfig) -> None:
    """Refuse a --chat-template that cannot be read, or is no template.

    Raises:
        ConfigError: naming the file, or the line.
    """
    template = read_template(config.chat_template)
    if template is not None:
        from lora_serve.chat.template import check_template  # slow to import

        check_template(template)


def check_tls(config: ServerConfig) -> None:
    """Refuse files of --ssl-… that cannot be used; uvicorn reads them later.

    Raises:
        ConfigError: naming the files.
    """
    if config.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (OSError, ssl.SSLError) as error:
        files = f"--ssl-certfile {config.ssl_certfile} and --ssl-keyfile {config.ssl_keyfile}"
        raise ConfigError(f"{files} cannot be used: {error}") from error
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"--ssl-ca-certs {config.ssl_ca_certs} cannot be used: {error}"
            ) from error


def read_template(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--chat-template {path} cannot be read: {error}") from error


def open_listener(config: ServerConfig) -> socket.socket:
    """The server's address, bound but not listening: a client that connects too early is refused.

    Raises:
        ConfigError: the address cannot be had.
    """
    host, port = config.host, config.port
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
            f"cannot listen on --host {host} --port {port}: {error.strerror}; "
            "choose another address or port, or stop what has it"
        ) from error
    return listener
