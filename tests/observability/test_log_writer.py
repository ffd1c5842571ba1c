"""Lines of the log, on a pipe that is read, is read late, or is not read at all."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_serve.observability.log import TEXT_FORMAT, TextFormatter
from lora_serve.observability.log_writer import FLUSH_SECONDS, BackgroundHandler

Pipe = tuple[int, int]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)  # a thread that still writes gets an error, and goes on


def logger_to(handler: logging.Handler, name: str) -> logging.Logger:
    handler.setFormatter(TextFormatter("%(levelname)s %(message)s"))
    logger = logging.Logger(name)
    logger.addHandler(handler)
    return logger


def read(reader: int, num_bytes: int) -> str:
    data = b""
    while len(data) < num_bytes:
        data += os.read(reader, 1 << 20)
    return data.decode()


def read_now(reader: int) -> str:
    """What has been written; "" if that is nothing."""
    try:
        return os.read(reader, 1 << 20).decode()
    except BlockingIOError:
        time.sleep(0.01)
        return ""


def test_lines_come_in_their_order(pipe: Pipe) -> None:
    handler = BackgroundHandler(pipe[1])
    logger = logger_to(handler, "order")
    for number in range(500):
        logger.info("line %d", number)
    handler.flush()
    lines = [f"INFO line {number}\n" for number in range(500)]
    assert read(pipe[0], len("".join(lines))) == "".join(lines)


def test_a_reader_that_takes_nothing_holds_no_caller_and_learns_how_much_was_lost(
    pipe: Pipe,
) -> None:
    handler = BackgroundHandler(pipe[1], max_waiting_bytes=100_000)
    logger = logger_to(handler, "stalled")
    for _ in range(1000):  # a caller that is held would never come out of this
        logger.info("x" * 1000)
    began = time.monotonic()
    handler.flush()
    assert time.monotonic() - began >= FLUSH_SECONDS
    os.set_blocking(pipe[0], False)
    seen = ""
    while handler._num_bytes:
        seen += read_now(pipe[0])
    logger.info("again")
    while not seen.endswith("again\n"):
        seen += read_now(pipe[0])
    *lines, again = seen.splitlines()
    losses = [line for line in lines if line.startswith("WARNING")]
    assert again == "INFO again"
    assert all(
        line.endswith(" lines of the log were lost here: nobody read them in time")
        for line in losses
    )
    num_lost = sum(int(line.split()[1]) for line in losses)
    assert num_lost > 0
    assert len(lines) - len(losses) + num_lost == 1000


def test_a_closed_log_stops_nothing() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    handler = BackgroundHandler(writer)
    logger = logger_to(handler, "closed")
    logger.info("into the void")
    logger.info("again")
    handler.flush()
    os.close(writer)


def test_a_process_writes_its_last_lines_and_ends_though_nobody_reads(tmp_path: Path) -> None:
    script = (
        "import logging, sys\n"
        "from lora_serve.config import LogConfig\n"
        "from lora_serve.observability.log import set_up_logging\n"
        "set_up_logging(LogConfig(), 'server')\n"
        "for _ in range(int(sys.argv[1])): logging.info('x' * 999)\n"
        "logging.info('the last')\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run([*command, "2000"], capture_output=True, timeout=60, check=True)
    assert done.stderr.endswith(b"the last\n")
    assert done.stderr.count(b"\n") == 2001
    stuck = subprocess.Popen([*command, "2000"], stderr=subprocess.PIPE)
    assert stuck.wait(timeout=60) == 0
    assert stuck.stderr is not None
    stuck.stderr.close()


def test_a_ctrl_c_that_the_main_thread_holds_back_is_not_taken_by_the_thread_that_writes() -> None:
    """Where an engine's process is started, it would leave that process half started."""
    script = (
        "import os, signal\n"
        "from lora_serve.observability.log_writer import BackgroundHandler\n"
        "BackgroundHandler(2)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "print(signal.SIGINT in signal.sigpending())\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr


def test_only_the_log_itself_begins_a_line_whatever_a_text_holds() -> None:
    forged = "a\n2026-01-01 00:00:00,000 INFO x: forged\r\x1b[31m\u2028\x00\ud800 é\ttab"
    record = logging.LogRecord("x", logging.INFO, "f", 1, "name %s", (forged,), None)
    first, *others = TextFormatter(TEXT_FORMAT).format(record).split("\n")
    assert first.endswith("INFO x: name a")
    (other,) = others
    assert other == (
        "  2026-01-01 00:00:00,000 INFO x: forged\\r\\x1b[31m\\u2028\\x00\\ud800 é\ttab"
    )
