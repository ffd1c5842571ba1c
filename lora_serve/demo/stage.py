"""The servers that scenarios are played on, one process each; the next is started ahead of time.

All logs lie in one directory, which outlives the stage: the caller made it and deletes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from lora_serve.demo.scenarios import Server, server_flags
from lora_serve.demo.server_process import ServerProcess


class Stage:
    """Starts servers when asked for and stops whatever still runs at its end."""

    def __init__(
        self,
        model: Path,
        log_directory: Path,
        ports: dict[Server, int],
        flags: Sequence[str] = (),
    ) -> None:
        """Ports: for servers that must not take just any free one. flags: more of them, for all."""
        self._model = model
        self._log_directory = log_directory
        self._ports = ports
        self._flags = flags
        self._processes: dict[Server, ServerProcess] = {}

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._processes.values():
            process.begin_to_stop()
        for server in tuple(self._processes):
            self.stop(server)

    def start(self, server: Server) -> ServerProcess:
        """Start a server, unless it runs; do not wait for it."""
        if server not in self._processes:
            log_path = self._log_directory / f"{server.name.lower()}.log"
            self._processes[server] = ServerProcess(
                self._model,
                self.flags_of(server),
                log_path,
                port=self._ports.get(server, 0),
            )
        return self._processes[server]

    def flags_of(self, server: Server) -> tuple[str, ...]:
        """All of a server's but model and port; a later one counts where one is there twice."""
        return (*server_flags(server), *self._flags)

    def stop(self, server: Server) -> None:
        self._processes.pop(server).stop()
