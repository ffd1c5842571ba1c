"""The images' HEALTHCHECK: asks the server that runs here, wherever its flags have it listen.

The address is read from the command line of the running server, so that it is right whatever
--port, --host, --uds, --allowed-hosts or --ssl-certfile say. The exit code is 0 if /health answers
200, else 1 with a line that says why.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from lora_serve.cli import serve
from lora_serve.cli.arguments import server_config
from lora_serve.cli.parser import OneLineParser
from lora_serve.config import ServerConfig
from lora_serve.config.server import ANY_HOST

TIMEOUT_SECONDS = 5.0
PROGRAMS = ("lora-serve", "lora_serve.cli.main")  # the script; python -m


def main(processes: Path = Path("/proc")) -> int:
    try:
        config = next(configs(processes), None)
        if config is None:
            raise OSError("no `lora-serve serve` runs here")
        status = health(config)
    except (OSError, http.client.HTTPException) as error:
        print(f"unhealthy: {error}")
        return 1
    print(f"/health answered {status}")
    return 0 if status == 200 else 1


def configs(processes: Path) -> Iterator[ServerConfig]:
    """The settings of each `lora-serve serve` among the processes, the oldest first."""
    for directory in sorted(processes.glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            words = (directory / "cmdline").read_bytes().decode().rstrip("\0").split("\0")
        except OSError:
            continue  # it has ended
        for at, word in enumerate(words[:-1]):
            if Path(word).name in PROGRAMS and words[at + 1] == "serve":
                parser = OneLineParser()
                serve.add_arguments(parser)
                yield server_config(parser.parse_args(words[at + 2 :]))


def health(config: ServerConfig) -> int:
    """The status of /health.

    A server that asks clients for certificates gets none from here: that it accepts a connection
    must do.
    """
    if config.ssl_ca_certs is not None:
        _connected(config).close()
        return 200
    host = config.allowed_hosts[0] if config.allowed_hosts else "localhost"
    with closing(http.client.HTTPConnection("localhost")) as connection:
        connection.sock = _connected(config)
        if config.ssl_certfile is not None:
            context = ssl._create_unverified_context()  # it has the certificate of its public name
            connection.sock = context.wrap_socket(connection.sock)
        connection.request("GET", "/health", headers={"Host": host})
        with connection.getresponse() as answer:
            return answer.status


def _connected(config: ServerConfig) -> socket.socket:
    if config.uds is not None:
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.settimeout(TIMEOUT_SECONDS)
        unix.connect(config.uds)
        return unix
    host = "localhost" if config.host in ANY_HOST else config.host
    return socket.create_connection((host, config.port), TIMEOUT_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
