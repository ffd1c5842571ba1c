"""What a server can know to be wrong before it has a model: its address, and files it is given."""

from __future__ import annotations

import contextlib
import socket
import ssl
from dataclasses import dataclass, replace
from pathlib import Path

from lora_serve.chat.formats import AUTO, reasoning_format, require_tool_format, tool_format
from lora_serve.config import ModelConfig, ServerConfig
from lora_serve.errors import ConfigError

BACKLOG = 2048  # connections that the system holds until they are accepted


def check_chat_template(config: ServerConfig) -> None:
    """Refuse a --chat-template that cannot be read, or is no template.

    Raises:
        ConfigError: naming the file, or the line.
    """
    template = read_template(config.chat_template)
    if template is not None:
        from lora_serve.chat.template import check_template  # slow to import

        check_template(template)


def check_parsers(config: ServerConfig) -> None:
    """Refuse a --tool-call-parser or --reasoning-parser that there is not.

    Raises:
        ConfigError: naming those that there are.
    """
    tool_format(config.tool_call_parser, "")
    reasoning_format(config.reasoning_parser, "")


def check_tool_choice(config: ServerConfig, model: ModelConfig) -> None:
    """Refuse --enable-auto-tool-choice where no template has a format of calls that is known.

    Raises:
        ConfigError: naming the remedy.
    """
    if not config.enable_auto_tool_choice or config.tool_call_parser != AUTO:
        return
    from lora_serve.text.chat_template_files import chat_templates  # slow to import

    template = read_template(config.chat_template)
    if template is None:
        template = chat_templates(model.tokenizer or model.model, model.revision)
    require_tool_format(tool_format(AUTO, template))


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


def read_template(given: str | None) -> str | None:
    """The text of a file, or the template itself, which a brace tells from a path."""
    if given is None:
        return None
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if "{" in given:
            return given
        raise ConfigError(f"--chat-template {given} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class Listeners:
    """The server's addresses, bound but not listening. metrics: that of --metrics-port, or None.

    path: of the API's Unix socket, if it is one; removed at the end.
    """

    api: socket.socket
    metrics: socket.socket | None = None
    path: str | None = None

    def with_port(self, server: ServerConfig) -> ServerConfig:
        """The settings with the port that --port 0 has come to."""
        if self.api.family == socket.AF_UNIX:
            return server
        return replace(server, port=self.api.getsockname()[1])

    def listen(self) -> None:
        """Let clients connect.

        Raises:
            ConfigError: another server has begun to listen on an address in the meantime.
        """
        for listener in self._all:
            try:
                listener.listen(BACKLOG)
            except OSError as error:
                address = listener.getsockname()
                where = address if isinstance(address, str) else f"{address[0]} port {address[1]}"
                raise ConfigError(f"cannot listen on {where}: {error.strerror}") from error

    def close(self) -> None:
        for listener in self._all:
            listener.close()
        if self.path is not None:
            Path(self.path).unlink(missing_ok=True)

    @property
    def _all(self) -> list[socket.socket]:
        return [self.api, *([] if self.metrics is None else [self.metrics])]


def open_listeners(config: ServerConfig) -> Listeners:
    """Bind the server's addresses: a client that connects before they listen is refused.

    Raises:
        ConfigError: an address cannot be had.
    """
    with contextlib.ExitStack() as stack:
        if config.uds is not None:
            api = stack.enter_context(_bound_to_path(config.uds))
        else:
            api = stack.enter_context(_bound("", config.host, config.port))
        metrics = None
        if config.metrics_port is not None:
            metrics = stack.enter_context(
                _bound("metrics-", config.metrics_host, config.metrics_port)
            )
        stack.pop_all()  # bound: now they are the caller's to close
    return Listeners(api, metrics, config.uds)


def _bound(prefix: str, host: str, port: int) -> socket.socket:
    """A socket at the address of --{prefix}host and --{prefix}port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            stack.pop_all()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on --{prefix}host {host} --{prefix}port {port}: {error.strerror}; "
            "choose another address or port, or stop what has it"
        ) from error
    return listener


def _bound_to_path(path: str) -> socket.socket:
    """A Unix socket; one that a killed server left behind is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_abandoned(path):
            Path(path).unlink()
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on --uds {path}: {error.strerror or error}; choose another path, or "
            "stop what has it"
        ) from error
    return listener


def _is_abandoned(path: str) -> bool:
    """Whether a socket lies there on which no process listens."""
    if not Path(path).is_socket():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
    return False


def shown_address(listener: socket.socket, scheme: str = "http") -> str:
    """Where clients reach it."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
