"""What the user types: lines with history and completion, and messages of several lines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

try:
    import readline
except ImportError:  # a Python without it reads plain lines
    readline = None  # type: ignore[assignment]

QUOTES = '"""'
PROMPT, CONTINUED = "> ", ". "
DIM, BOLD, PLAIN = "\x1b[2m", "\x1b[1m", "\x1b[0m"


class ChatInput:
    """Reads messages from a terminal. complete: what a beginning of a line may become."""

    def __init__(self, complete: Callable[[str], Sequence[str]]) -> None:
        self._complete = complete
        if readline is not None:
            readline.set_completer(self._candidate)
            readline.set_completer_delims("")  # the whole line is completed
            readline.parse_and_bind("tab: complete")
            readline.parse_and_bind("set enable-bracketed-paste on")
            readline.set_auto_history(False)

    def read(self) -> str:
        """The next message: a line, lines that end in a backslash, or what triple quotes enclose.

        Raises:
            EOFError: Ctrl-D.
            KeyboardInterrupt: Ctrl-C.
        """
        message = read_message(lambda is_first: input(PROMPT if is_first else CONTINUED))
        if readline is not None and message.strip():
            with contextlib.suppress(ValueError):  # a history has no NUL
                readline.add_history(message)
        return message

    def _candidate(self, line: str, index: int) -> str | None:
        found = self._complete(line)
        return found[index] if index < len(found) else None


def read_message(read_line: Callable[[bool], str]) -> str:
    """Put a message together. read_line: the next line; True asks for the first. May raise."""
    line = read_line(True)
    if line.lstrip().startswith(QUOTES):
        return _quoted(line.lstrip().removeprefix(QUOTES), read_line)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(read_line(False))
    return "\n".join(lines)


def _quoted(rest: str, read_line: Callable[[bool], str]) -> str:
    lines = [rest]
    while not lines[-1].rstrip().endswith(QUOTES):
        lines.append(read_line(False))
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines).strip("\n")
