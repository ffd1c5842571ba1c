"""An engine's process, from its start to its end. What is said to it is the client's business."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Generator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker

from lora_serve.config import EngineConfig
from lora_serve.engine.child import run_engine_process
from lora_serve.errors import ConfigError


class EngineProcess:
    """A process that imports what engines need, and waits for `run` to say which one to be.

    It may be spawned long before that, so that its imports take no time of the start, and check a
    configuration first. One that is not to be an engine is closed.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._orders, self._its_end = context.Pipe()
        self._process = context.Process(
            target=run_engine_process, args=(self._its_end,), name="engine"
        )
        self._exit_code: int | None = None  # of one that was closed
        self._is_closed = False

    def spawn(self) -> None:
        """Start it. It never sees a Ctrl-C, not even before it can say so itself."""
        resource_tracker.ensure_running()  # else start() does it, and lets SIGINT through again
        with _sigint_blocked():
            self._process.start()
        self._its_end.close()

    @property
    def pid(self) -> int | None:
        """The process id; None until the process is spawned, and once it is closed."""
        return None if self._is_closed else self._process.pid

    @property
    def sentinel(self) -> int:
        """A descriptor that can be read once the process has ended."""
        return self._process.sentinel

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while the process runs, negative for the signal that ended it."""
        return self._exit_code if self._is_closed else self._process.exitcode

    def begin_check(self, config: EngineConfig) -> None:
        """Have it look for what no engine could start with, as `end_check` tells."""
        with suppress(OSError):  # it has died, which end_check tells too
            self._orders.send(config)

    def end_check(self) -> None:
        """Wait for what `begin_check` asked for.

        Raises:
            ConfigError: with a line for each reason why there can be no such engine.
        """
        try:
            refusal = self._orders.recv()
        except (EOFError, OSError):
            self._process.join()
            refusal = (
                "the engine's process ended while it checked the settings, with exit code "
                f"{self._process.exitcode}; see its last lines above"
            )
        if refusal is not None:
            raise ConfigError(refusal)

    def run(self, config: EngineConfig, message_address: str, reply_address: str) -> None:
        """Have it be an engine. Raises OSError if it has died."""
        self._orders.send((config, message_address, reply_address))
        self._orders.close()

    def join(self, seconds: float | None = None) -> None:
        """Wait until it has ended, or so long."""
        self._process.join(seconds)

    def kill(self) -> None:
        """End it at once, if it was spawned, and wait for its end."""
        if self.pid is not None:
            self._process.kill()
            self._process.join()

    def close(self) -> None:
        """Kill it, and give back its descriptors. Again, it does nothing."""
        if self._is_closed:
            return
        self.kill()
        self._exit_code = self._process.exitcode if self.pid is not None else None
        self._is_closed = True
        self._process.close()  # else its pipes stay open until it is collected
        for end in (self._its_end, self._orders):
            end.close()


@contextmanager
def _sigint_blocked() -> Generator[None, None, None]:
    """A process started meanwhile never sees a Ctrl-C, not even before it can say so itself."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
