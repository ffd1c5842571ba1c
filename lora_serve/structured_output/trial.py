"""Compiles constraints in processes that may be killed: what harms one of them harms nothing else.

A library may take hours for 100 bytes of a schema, or gigabytes, or end its process, and threads
cannot be stopped. Each trial is a fork, so it has the vocabulary at no cost; of a process with one
thread, because no other could hold a lock of the library then. For the same reason `TrialStarter`
is a process of its own: it forks another process of trials where one has died.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import select
import signal
import socket
import threading
from multiprocessing.connection import Connection

import msgspec

from lora_serve.errors import InvalidRequestError
from lora_serve.memory_bound import memory_in_use
from lora_serve.structured_output.backend import Backend
from lora_serve.structured_outputs import StructuredOutput

logger = logging.getLogger(__name__)

_NICENESS = 5  # behind the kernels' threads
_MOST_OUTCOME_BYTES = 2**16
_MOST_REASON_CHARS = 200
_FIRST_FILE = 3  # behind stdin, stdout, stderr
_MOST_FILES = 2**16
_CANCEL = b""
_CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


class Outcome(msgspec.Struct, frozen=True):
    """What became of a trial. num_bytes: the memory that the compiled grammar takes, about.

    error: why the constraint is refused. failure: why the trial says nothing of the constraint.
    """

    num_bytes: int = 0
    error: str = ""
    failure: str = ""
    is_cancelled: bool = False

    @property
    def is_sound(self) -> bool:
        """Whether it could be compiled."""
        return not (self.error or self.failure or self.is_cancelled)


class TrialStarter:
    """A process that starts processes of trials. Make it before this process starts any thread."""

    def __init__(self, backend: Backend, *, seconds: float, max_bytes: int) -> None:
        """seconds, max_bytes: what compiling one constraint may take."""
        self._socket, theirs = socket.socketpair()
        if os.fork() == 0:
            try:
                _close_files_but(theirs.fileno())
                _start_as_asked(theirs, _Trials(backend, seconds, max_bytes))
            finally:
                os._exit(0)
        theirs.close()

    def start(self) -> Connection:
        """Start a process of trials.

        Raises:
            OSError: it cannot be asked; this process must end, for the engine to start another.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._socket, [b"1"], [theirs.fileno()])
        return Connection(ours.detach())


class TrialProcess:
    """The process that tries one constraint after the other, and another where it has died."""

    def __init__(self, starter: TrialStarter) -> None:
        self._starter = starter
        self._connection: Connection | None = None
        self._sending = threading.Lock()  # what is cancelled may be about to be tried again

    def begin(self, constraint: StructuredOutput) -> None:
        """Begin to compile; `outcome` must be called before the next begins.

        Raises:
            OSError: as `TrialStarter.start`.
        """
        if self._connection is None:
            self._connection = self._starter.start()
        try:
            with self._sending:
                self._connection.send_bytes(msgspec.msgpack.encode(constraint))
        except OSError:
            self._forget()

    def outcome(self) -> Outcome:
        """Wait until the constraint is compiled or refused, or the process has died."""
        try:
            if self._connection is not None:
                return msgspec.msgpack.decode(self._connection.recv_bytes(), type=Outcome)
        except (EOFError, OSError):
            self._forget()
        return Outcome(failure="the process that tries to compile them has died")

    def cancel(self) -> None:
        """Let `outcome` return soon. Another thread may wait in it."""
        connection = self._connection
        try:
            if connection is not None:
                with self._sending:
                    connection.send_bytes(_CANCEL)
        except OSError:
            logger.debug("a trial is cancelled whose process has died")

    def _forget(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


def _start_as_asked(theirs: socket.socket, trials: _Trials) -> None:
    """Fork a process for each socket that comes, until the other end is closed."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # none of them is waited for
    while True:
        data, numbers, _, _ = socket.recv_fds(theirs, 1, 1)
        if not data:
            return
        try:
            is_child = os.fork() == 0
        except OSError:  # it shows as a process that has died
            is_child = False
        if is_child:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _close_files_but(numbers[0])
            trials.serve(Connection(numbers[0]))
            return
        os.close(numbers[0])


class _Trials:
    """What a process of trials does."""

    def __init__(self, backend: Backend, seconds: float, max_bytes: int) -> None:
        self._backend = backend
        self._seconds = seconds
        self._max_bytes = max_bytes

    def serve(self, connection: Connection) -> None:
        """Try what comes until the other end is closed."""
        while True:
            try:
                data = connection.recv_bytes()
                if data == _CANCEL:
                    continue  # the trial was over already
                constraint = msgspec.msgpack.decode(data, type=StructuredOutput)
                connection.send_bytes(msgspec.msgpack.encode(self._tried(constraint, connection)))
            except (EOFError, BrokenPipeError, ConnectionResetError):
                return

    def _tried(self, constraint: StructuredOutput, connection: Connection) -> Outcome:
        try:
            reader, writer = os.pipe()
        except OSError as error:
            return Outcome(failure=f"no pipe can be made: {error}")
        with os.fdopen(reader, "rb", 0) as read_end:
            with os.fdopen(writer, "wb", 0):
                try:
                    pid = os.fork()
                except OSError as error:
                    return Outcome(failure=f"no process can be started: {error}")
                if pid == 0:
                    self._try(constraint, writer)
            return self._outcome(constraint, pid, read_end.fileno(), connection)

    def _try(self, constraint: StructuredOutput, writer: int) -> None:
        """Compile in the fork, and end it."""
        try:
            _limit_this_process(self._seconds, self._max_bytes)
            outcome = _compiled(self._backend, constraint, self._max_bytes)
            os.write(writer, msgspec.msgpack.encode(outcome))
        except MemoryError:
            os.abort()
        finally:
            os._exit(0)

    def _outcome(
        self, constraint: StructuredOutput, pid: int, reader: int, connection: Connection
    ) -> Outcome:
        cancel = connection.fileno()
        try:
            readable, _, _ = select.select([reader, cancel], [], [], self._seconds)
            data = os.read(reader, _MOST_OUTCOME_BYTES) if reader in readable else b""
        finally:
            # A process that has closed its end of the pipe ends by what closed it, not by this.
            if reader not in readable:
                os.kill(pid, signal.SIGKILL)
            _, status, usage = os.wait4(pid, 0)
        if data:
            return msgspec.msgpack.decode(data, type=Outcome)
        what = f"structured_outputs: compiling the {constraint.kind} takes more than"
        if reader in readable and usage.ru_utime + usage.ru_stime < self._seconds:
            return _ended_outcome(status, f"{what} {_mib(self._max_bytes)}")
        if cancel in readable:
            connection.recv_bytes()
            return Outcome(is_cancelled=True)
        return Outcome(
            error=f"{what} {self._seconds:g} s; simplify it, or raise "
            "--structured-outputs-config.compile-timeout"
        )


def _ended_outcome(status: int, takes_more: str) -> Outcome:
    """What a process without an outcome died of: a library's own ways to die, or another's kill."""
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) in _CRASHES:
        return Outcome(error=f"{takes_more}, or nests too deep; simplify it")
    return Outcome(failure=f"the process that compiled it ended with wait status {status}")


def _compiled(backend: Backend, constraint: StructuredOutput, max_bytes: int) -> Outcome:
    what = f"structured_outputs: compiling the {constraint.kind}"
    try:
        _, before = memory_in_use()
        backend.compile(constraint).matcher().bitmask()
        return Outcome(num_bytes=max(0, memory_in_use()[1] - before))
    except InvalidRequestError as error:
        return Outcome(error=str(error))
    except MemoryError:
        return Outcome(error=f"{what} takes more than {_mib(max_bytes)}; simplify it")
    except RecursionError:
        return Outcome(error=f"{what} failed, as it nests too deep; simplify it")
    except OSError as error:
        return Outcome(failure=f"{what} failed: {error}")
    except BaseException as error:  # a panic of a library in Rust is no Exception
        reason = repr(error)[:_MOST_REASON_CHARS]
        return Outcome(error=f"{what} failed, by an error in the library: {reason}; change it")


def _mib(num_bytes: int) -> str:
    return f"{num_bytes // 2**20} MiB of memory"


def _limit_this_process(seconds: float, max_bytes: int) -> None:
    """max_bytes: on top of what it has."""
    os.nice(_NICENESS)
    limit = memory_in_use()[0] + max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    cpu_seconds = math.ceil(seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a library says when it is out of memory


def _close_files_but(number: int) -> None:
    """Close what a fork inherited: a socket must be closed when its owner ends, not later."""
    os.closerange(_FIRST_FILE, number)
    os.closerange(number + 1, _MOST_FILES)
