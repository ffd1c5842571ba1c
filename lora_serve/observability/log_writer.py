"""Writes lines of the log in a thread, so that a stderr that is not read stops no answer.

A pipe whose reader hangs blocks its writer, which is a thread of its own here; the lines that come
meanwhile wait up to a bound, and further ones are counted and told of later.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections import deque

MAX_WAITING_BYTES = 4 * 2**20
FLUSH_SECONDS = 1.0  # that the end of a process waits for a reader


class BackgroundHandler(logging.Handler):
    """Formats lines in the caller's thread and hands them to the one that writes."""

    def __init__(self, file_descriptor: int, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        """Write to an open file, which is not closed.

        max_waiting_bytes: of lines that wait to be written.
        """
        super().__init__()
        self._file = file_descriptor
        self._max_waiting_bytes = max_waiting_bytes
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._num_bytes = 0  # of the waiting lines and the one that is being written
        self._num_lost = 0  # that did not find room since the last one that did
        writer = threading.Thread(target=self._write_all, name="log", daemon=True)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            writer.start()  # it inherits this: where the main thread blocks a Ctrl-C, none is taken
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = _encoded(self.format(record))
        except Exception:  # of an object in the record that cannot be shown
            self.handleError(record)
            return
        with self._changed:
            # After a loss there must be room for many, so that not every second line tells of one.
            limit = self._max_waiting_bytes // (2 if self._num_lost else 1)
            if self._num_bytes + len(line) > limit:
                self._num_lost += 1
                return
            if self._num_lost:
                self._put(_encoded(self.format(_loss(record, self._num_lost))))
                self._num_lost = 0
            self._put(line)
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all is written, but not for a reader that takes nothing."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_bytes, FLUSH_SECONDS)

    def _put(self, line: bytes) -> None:
        self._waiting.append(line)
        self._num_bytes += len(line)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                line = self._waiting.popleft()
            with contextlib.suppress(OSError):  # a log that is closed is no reason to stop
                _write(self._file, line)
            with self._changed:
                self._num_bytes -= len(line)
                self._changed.notify_all()


def _write(file_descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(file_descriptor, data) :]


def _encoded(line: str) -> bytes:
    return f"{line}\n".encode(errors="backslashreplace")


def _loss(record: logging.LogRecord, num_lost: int) -> logging.LogRecord:
    return logging.LogRecord(
        __name__,
        logging.WARNING,
        record.pathname,
        record.lineno,
        "%d lines of the log were lost here: nobody read them in time",
        (num_lost,),
        None,
    )
