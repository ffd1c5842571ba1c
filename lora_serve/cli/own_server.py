"""A server that a command starts for itself, and ends: on a free port of this machine alone.

What it tells while it starts is passed on; later it would stand between the lines of the command,
so the end of it is kept for the case that the server dies. The server is in a session of its own,
so that Ctrl-C does not end it, and is killed with the process that started it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from types import TracebackType

from lora_serve.cli.remote import Remote
from lora_serve.demo.server_process import dying_with_parent, free_port
from lora_serve.errors import LoraServeError

READY = b"lora-serve is ready"
STOP_SECONDS = 20.0
KEPT_BYTES = 4096
_CHUNK = 65536


class OwnServerError(LoraServeError):
    """The server that was started has ended; what it told is shown."""


class OwnServer:
    """Runs from construction to the end of the context; `wait_until_ready` comes first."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """arguments: of `lora-serve serve`, but for its address."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = (
            *(sys.executable, "-m", "lora_serve.cli.main", "serve", *arguments),
            *("--host", "127.0.0.1", "--port", str(port)),
        )
        self._is_starting = True
        self._told: deque[bytes] = deque(maxlen=KEPT_BYTES // 80)
        source, end = _terminal() if sys.stderr.isatty() else os.pipe()
        with os.fdopen(end, "wb") as pipe:
            self._process = subprocess.Popen(
                dying_with_parent(command),
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                start_new_session=True,
            )
        self._is_ready = threading.Event()
        self._reader = threading.Thread(target=self._relay, args=(source,), daemon=True)
        self._reader.start()

    def __enter__(self) -> OwnServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def wait_until_ready(self) -> None:
        """Raises OwnServerError if it ends instead, or listens elsewhere."""
        while not self._is_ready.wait(0.2):
            if self._process.poll() is not None:
                self._reader.join(1)
                raise OwnServerError(f"the server ended with code {self._process.returncode}")
        with Remote(self.url, None) as remote:
            if not remote.is_there():
                raise OwnServerError(
                    f"the server does not answer at {self.url}; leave out --uds and TLS"
                )
        time.sleep(0.05)  # the end of what it tells may be on its way
        self._is_starting = False

    def check(self) -> None:
        """Raise OwnServerError, with the end of what it told, unless it runs."""
        if self._process.poll() is not None:
            told = b"".join(self._told).decode(errors="replace").strip().splitlines()
            ended = f"the server ended with code {self._process.returncode}"
            raise OwnServerError("\n".join([f"{ended}; it told last:", *told[-5:]]))

    def _relay(self, source: int) -> None:
        ready = b""
        with os.fdopen(source, "rb", buffering=0) as told, contextlib.suppress(OSError):
            while piece := told.read(_CHUNK):  # a terminal's end is an OSError
                self._told.append(piece)
                if self._is_starting:
                    os.write(sys.stderr.fileno(), piece)
                ready = ready[-len(READY) :] + piece
                if READY in ready:
                    self._is_ready.set()


def _terminal() -> tuple[int, int]:
    """A terminal of its own, as wide as this one, so that it draws its bars."""
    import pty
    import termios

    source, end = pty.openpty()
    with contextlib.suppress(OSError, termios.error):
        termios.tcsetwinsize(end, termios.tcgetwinsize(sys.stderr.fileno()))
    return source, end
