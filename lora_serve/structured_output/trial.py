"""Compiles constraints in processes that may be killed: what harms one of them harms nothing else.

A library may take hours for 100 bytes of a schema, or gigabytes, or end its process, and threads
cannot be stopped. Each trial is a fork, so it has the vocabulary at no cost; of a process with one
thread, because no other could hold a lock of the library then.
"""

from __future__ import annotations

import math
import os
import resource
import select
import signal
from multiprocessing.connection import Connection, Pipe

import msgspec

from lora_serve.errors import InvalidRequestError
from lora_serve.structured_output.backend import Backend
from lora_serve.structured_outputs import StructuredOutput

_NICENESS = 5  # behind the kernels' threads
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MOST_OUTCOME_BYTES = 2**16
_FIRST_FILE = 3  # behind stdin, stdout, stderr
_MOST_FILES = 2**16


class _Outcome(msgspec.Struct, frozen=True):
    error: str = ""
    num_bytes: int = 0


class TrialProcess:
    """A process that forks for each trial. Make it before this process starts any thread."""

    def __init__(self, backend: Backend, *, seconds: float, max_bytes: int) -> None:
        self._seconds = seconds
        self._max_bytes = max_bytes
        self._connection, theirs = Pipe()
        if os.fork() == 0:
            try:
                _close_files_but(theirs.fileno())
                self._serve(backend, theirs)
            finally:
                os._exit(0)
        theirs.close()

    def try_to_compile(self, constraint: StructuredOutput) -> int:
        """How many bytes the compiled grammar takes, about. One thread calls at a time.

        Raises:
            InvalidRequestError: it is malformed, or takes longer, or more memory.
        """
        self._connection.send_bytes(msgspec.msgpack.encode(constraint))
        outcome = msgspec.msgpack.decode(self._connection.recv_bytes(), type=_Outcome)
        if outcome.error:
            raise InvalidRequestError(outcome.error, "structured_outputs")
        return outcome.num_bytes

    def _serve(self, backend: Backend, connection: Connection) -> None:
        """Try, in the other process, until this one is gone."""
        while True:
            try:
                data = connection.recv_bytes()
            except EOFError:
                return
            constraint = msgspec.msgpack.decode(data, type=StructuredOutput)
            outcome = self._tried(backend, constraint)
            connection.send_bytes(msgspec.msgpack.encode(outcome))

    def _tried(self, backend: Backend, constraint: StructuredOutput) -> _Outcome:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _limit_this_process(self._seconds, self._max_bytes)
                os.write(writer, msgspec.msgpack.encode(_compiled(backend, constraint)))
            finally:
                os._exit(0)
        os.close(writer)
        is_there = bool(select.select([reader], [], [], self._seconds)[0])
        data = os.read(reader, _MOST_OUTCOME_BYTES) if is_there else b""
        os.close(reader)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if data:
            return msgspec.msgpack.decode(data, type=_Outcome)
        what = f"structured_outputs: compiling the {constraint.kind} takes more than"
        if is_there:  # it ended without a word: out of memory, or of stack
            size = self._max_bytes // 2**20
            return _Outcome(f"{what} {size} MiB of memory, or nests too deep; simplify it")
        return _Outcome(
            f"{what} {self._seconds:g} s; simplify it, or raise "
            "--structured-outputs-config.compile-timeout"
        )


def _compiled(backend: Backend, constraint: StructuredOutput) -> _Outcome:
    _, before = _memory()
    try:
        backend.compile(constraint).matcher().bitmask()
    except InvalidRequestError as error:
        return _Outcome(str(error))
    return _Outcome(num_bytes=max(0, _memory()[1] - before))


def _limit_this_process(seconds: float, max_bytes: int) -> None:
    """max_bytes: on top of what it has."""
    os.nice(_NICENESS)
    limit = _memory()[0] + max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    cpu_seconds = math.ceil(seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what a library says when it is out of memory


def _memory() -> tuple[int, int]:
    """Bytes of address space, and of memory in use."""
    with open("/proc/self/statm") as file:
        size, resident, *_ = file.read().split()
    return int(size) * _PAGE_BYTES, int(resident) * _PAGE_BYTES


def _close_files_but(number: int) -> None:
    """Close what a fork inherited: a socket must be closed when its owner ends, not later."""
    os.closerange(_FIRST_FILE, number)
    os.closerange(number + 1, _MOST_FILES)
