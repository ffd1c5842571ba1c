"""A Ctrl-C while a server starts: it is taken once, and it is never lost."""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager


class Interrupt:
    """Whether Ctrl-C was pressed.

    Python raises KeyboardInterrupt wherever the main thread happens to be. In a finalizer, or in
    an import that catches everything, it comes to nothing, and the start would go on to its end.
    """

    def __init__(self) -> None:
        self.was_pressed = False

    def raise_at_first(self, *_: object) -> None:
        """Handle the signal. A second one would keep the first from ending the engine's process."""
        self.was_pressed = True
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    def raise_if_lost(self) -> None:
        """Raise KeyboardInterrupt again if it was raised, and yet the program has come here."""
        if self.was_pressed:
            raise KeyboardInterrupt


@contextmanager
def interrupted_once() -> Generator[Interrupt, None, None]:
    """Let the first Ctrl-C raise KeyboardInterrupt, and a second one do nothing.

    Once the event loop has handlers of its own, these count.
    """
    interrupt = Interrupt()
    before = signal.signal(signal.SIGINT, interrupt.raise_at_first)
    try:
        yield interrupt
        interrupt.raise_if_lost()
    finally:
        if not interrupt.was_pressed:
            signal.signal(signal.SIGINT, before)
