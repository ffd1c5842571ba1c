"""Renders the chat templates that requests bring, in a process that may be killed.

Jinja's sandbox keeps a template from the machine's files, not from its time and memory: a loop of
five words runs for hours, and ten characters write gigabytes. So one process of its own compiles
and renders them, within limits that the system holds, and another is started where it has died.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

from lora_serve.errors import InvalidRequestError, OverloadedError, PromptTooLongError
from lora_serve.memory_bound import memory_in_use

logger = logging.getLogger(__name__)

SECONDS = 2  # of processor time, for one rendering
MAX_BYTES = 2**28  # on top of what the process has when it begins
START_SECONDS = 600.0  # a machine without time to spare may take minutes
PATIENCE_SECONDS = 60.0  # with a process that gets no processor
_NICENESS = 5  # behind the kernels' threads
_FIELD = "chat_template"


@dataclass(frozen=True, slots=True)
class Rendering:
    """What `chat.template.render_chat` is asked for, all of it plain JSON.

    variables: the model's special tokens, and what the request adds to them.
    """

    source: str
    messages: Sequence[Mapping[str, object]]
    tools: Sequence[Mapping[str, object]] | None
    variables: Mapping[str, object]
    add_generation_prompt: bool
    continue_final_message: bool
    max_chars: int | None


class RequestTemplates:
    """The process, from the first rendering on. Any thread may call it; one is at work at once."""

    def __init__(self, seconds: int = SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None  # ends the process

    def render(self, rendering: Rendering) -> str:
        """The text that the template writes.

        Raises:
            InvalidRequestError: it refuses the messages, or takes more than it may.
            PromptTooLongError: it writes more than max_chars.
            OverloadedError: there is no process, for no fault of the template's.
        """
        order = json.dumps({**asdict(rendering), "seconds": self._seconds}).encode()
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self.close()  # it was ended, and by no template
            connection = self._connection or self._start()
            try:
                connection.send_bytes(order)
                reply = _received(connection, PATIENCE_SECONDS)
            except (EOFError, OSError) as error:
                self.close()
                raise InvalidRequestError(
                    f"the template takes more than {self._seconds} s of processor time, or "
                    f"{MAX_BYTES >> 20} MiB of memory; simplify it",
                    _FIELD,
                ) from error
        told = json.loads(reply)
        if "text" in told:
            return str(told["text"])
        raise (PromptTooLongError if told["is_too_long"] else InvalidRequestError)(
            str(told["error"]), told["param"]
        )

    def close(self) -> None:
        """End the process; the next rendering starts another."""
        self._connection = self._process = None
        self._end()

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        connection = Connection(ours.detach())
        try:
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                )
            self._end = weakref.finalize(self, _end, connection, process)
            _received(connection, START_SECONDS)
        except (EOFError, OSError) as error:
            self.close()
            raise OverloadedError(
                f"no process for templates of requests can be started: {error}; retry later"
            ) from error
        self._connection, self._process = connection, process
        return connection


def _received(connection: Connection, patience_seconds: float) -> bytes:
    """The next reply. Raises OSError where none comes in time, EOFError where none will."""
    if not connection.poll(patience_seconds):
        raise TimeoutError("it does not reply")
    return connection.recv_bytes()


def _end(connection: Connection, process: subprocess.Popen[bytes]) -> None:
    connection.close()
    process.kill()
    process.wait()


# ── the process ─────────────────────────────────────────────────────────────────────────────


def serve(connection: Connection) -> None:
    """Render what comes until the other end is closed."""
    from lora_serve.chat import template  # noqa: F401  (before the bound on memory)

    os.nice(_NICENESS)
    most_bytes = memory_in_use()[0] + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    connection.send_bytes(b"ready")
    while True:
        order = json.loads(connection.recv_bytes())
        _allow_seconds(order.pop("seconds"))
        connection.send_bytes(json.dumps(_rendered(Rendering(**order))).encode())


def _allow_seconds(seconds: int) -> None:
    """Have the system end this process when it has worked for so much longer."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + seconds, hard))


def _rendered(rendering: Rendering) -> dict[str, object]:
    from lora_serve.chat.model_template import ModelTemplate
    from lora_serve.chat.template import render_chat

    try:
        text = render_chat(
            ModelTemplate(),
            rendering.messages,
            add_generation_prompt=rendering.add_generation_prompt,
            continue_final_message=rendering.continue_final_message,
            chat_template=rendering.source,
            tools=rendering.tools,
            template_kwargs=rendering.variables,
            max_chars=rendering.max_chars,
        )
    except InvalidRequestError as error:
        if _is_of_memory(error):
            raise MemoryError from error  # which ends the process
        is_too_long = isinstance(error, PromptTooLongError)
        return {"error": str(error), "is_too_long": is_too_long, "param": error.param}
    return {"text": text}


def _is_of_memory(error: BaseException | None) -> bool:
    """Whether memory was refused: Jinja has other names for it, some without a word."""
    while error is not None and not isinstance(error, MemoryError):
        error = error.__cause__ or error.__context__
    return error is not None


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when to stop
    try:
        serve(Connection(int(sys.argv[1])))
    except (EOFError, BrokenPipeError, ConnectionResetError, MemoryError):
        return  # the server is gone, or starts another process


if __name__ == "__main__":
    main()
