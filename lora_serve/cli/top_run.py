"""A run of `lora-serve top`: looks again and again, and leaves the terminal as it was."""

from __future__ import annotations

import argparse
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from http import HTTPStatus
from types import FrameType

from lora_serve.cli.ending_signals import ended_by_signals
from lora_serve.cli.remote import Remote, RemoteError, UnreachableError
from lora_serve.cli.server_arguments import chosen_key
from lora_serve.cli.top_samples import Interval, Scrape, read_scrape
from lora_serve.cli.top_screen import MOST_ROWS, View, screen
from lora_serve.errors import ConfigError, LoraServeError

SHORTEST_INTERVAL = 0.1
PLAIN_COLUMNS = 120
_ENTER = "\x1b[?1049h\x1b[?25l"  # another screen, without a cursor
_LEAVE = "\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_QUIT = b"qQ\x1b\x04"


def run_top(args: argparse.Namespace) -> int:
    """Show a server until the user has seen enough.

    Raises:
        LoraServeError: it cannot be asked at all.
    """
    if not args.interval >= SHORTEST_INTERVAL:
        raise ConfigError(f"--interval {args.interval} must be at least {SHORTEST_INTERVAL}")
    with (
        Remote(args.url, chosen_key(args, os.environ)) as remote,
        _metrics(args, remote) as metrics,
    ):
        watch = Watch(remote, metrics)
        if args.once or not sys.stdout.isatty():
            return _show_plain(watch, args.interval, once=args.once)
        with ended_by_signals(), _whole_screen() as is_interrupted:
            _show(watch, args.interval, is_interrupted)
    return 0


def _metrics(args: argparse.Namespace, remote: Remote) -> AbstractContextManager[Remote]:
    if args.metrics_url is None:
        return nullcontext(remote)
    return Remote(args.metrics_url.rstrip("/").removesuffix("/metrics"), api_key=None)


class Watch:
    """Looks at one server, whose /metrics may have a port of their own."""

    def __init__(self, remote: Remote, metrics: Remote) -> None:
        self._remote = remote
        self._metrics = metrics
        self._last = self._scrape()

    def look(self) -> View:
        """What happened since the last look; an error of the server is a part of the view."""
        try:
            before, self._last = self._last, self._scrape()
            return View(
                self._remote.url,
                Interval(before, self._last),
                self._remote.models(),
                self._requests(),
            )
        except LoraServeError as error:
            still = Interval(self._last, self._last)
            return View(self._remote.url, still, trouble=str(error))

    def _scrape(self) -> Scrape:
        try:
            return read_scrape(self._metrics.get("/metrics").text, time.monotonic())
        except ValueError as error:
            raise UnreachableError(f"{self._metrics.url}/metrics: {error}") from error
        except RemoteError as error:
            if error.status != HTTPStatus.NOT_FOUND:
                raise
            hint = "name that port as --metrics-url http://HOST:PORT"
            raise RemoteError(f"{error}; {hint}", error.status) from error

    def _requests(self) -> list[dict[str, object]] | None:
        """The server's requests; None if it is no lora-serve, or does not tell them to this key."""
        try:
            listed = self._remote.get(f"/v1/requests?limit={MOST_ROWS}").json()
            return [dict(request) for request in listed["data"]]
        except (RemoteError, ValueError, KeyError, TypeError):
            return None


def _show_plain(watch: Watch, interval: float, *, once: bool) -> int:
    while True:
        time.sleep(interval)
        view = watch.look()
        if once and view.trouble:
            raise UnreachableError(view.trouble)
        print("\n".join(screen(view, PLAIN_COLUMNS)), end="\n" if once else "\n\n", flush=True)
        if once:
            return 0


def _show(watch: Watch, interval: float, is_interrupted: Callable[[], bool]) -> None:
    while not is_interrupted():
        size = shutil.get_terminal_size()
        lines = screen(watch.look(), size.columns, size.lines)
        text = "\r\n".join(line + _END_OF_LINE for line in lines)
        sys.stdout.write(_HOME + text + _END_OF_SCREEN)
        sys.stdout.flush()
        if _is_quit(interval):
            return


def _is_quit(seconds: float) -> bool:
    """Wait for so long; whether a key meanwhile ends it."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([sys.stdin], [], [], left)
        if ready and any(key in _QUIT for key in os.read(sys.stdin.fileno(), 64)):
            return True
    return False


@contextmanager
def _whole_screen() -> Iterator[Callable[[], bool]]:
    """Take the terminal, and give it back as it was however this ends. Ctrl-C is one such end.

    What it gives tells whether there was a Ctrl-C: its exception is lost where Python runs a
    finalizer just then.
    """
    import termios
    import tty

    keys = sys.stdin.fileno() if sys.stdin.isatty() else None
    before = None if keys is None else termios.tcgetattr(keys)
    interrupts: list[int] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    interrupting = signal.signal(signal.SIGINT, interrupt)
    stopping = signal.signal(signal.SIGTSTP, signal.SIG_IGN)  # a stop would leave it half taken
    try:
        if keys is not None:
            tty.setcbreak(keys)
        sys.stdout.write(_ENTER)
        sys.stdout.flush()
        yield lambda: bool(interrupts)
    except KeyboardInterrupt:
        pass
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        if keys is not None and before is not None:
            termios.tcsetattr(keys, termios.TCSADRAIN, before)
        signal.signal(signal.SIGTSTP, stopping)
        signal.signal(signal.SIGINT, interrupting)
