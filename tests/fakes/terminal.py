"""A program on a terminal of its own: what it shows, and keys for it."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import termios
import time
from collections.abc import Sequence
from types import TracebackType

PATIENCE_SECONDS = 60.0


class Terminal:
    """Runs a command on a pseudo-terminal, and kills it at the end of the context."""

    def __init__(self, command: Sequence[str], columns: int = 100, rows: int = 30) -> None:
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (rows, columns))
        self.settings_before = termios.tcgetattr(slave)
        self._slave = slave
        self.shown = ""
        self._process = subprocess.Popen(
            command,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # its own for Ctrl-C
            env=os.environ | {"TERM": "xterm"},
        )

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)
        os.close(self._slave)

    @property
    def settings(self) -> list[object]:
        return termios.tcgetattr(self._slave)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, pattern: str) -> str:
        """Wait until the terminal shows this, and forget all up to there; returns that part."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (match := re.search(pattern, self.shown, re.DOTALL)) is None:
            if not self._read(deadline - time.monotonic()):
                raise AssertionError(f"no {pattern!r} in {self.shown!r}")
        part, self.shown = self.shown[: match.end()], self.shown[match.end() :]
        return part

    def wait(self) -> int:
        """The exit code; all that was shown stays in `shown`."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            self._read(0.05)
        while self._read(0.05):
            pass
        return self._process.wait(1)

    def _read(self, seconds: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(0.0, seconds))
        if ready:
            self.shown += os.read(self._master, 65536).decode(errors="replace")
        return bool(ready)
