from __future__ import annotations

import io
import logging

import pytest

from lora_serve.observability.progress import Progress
from lora_serve.observability.sizes import shown_bytes, shown_count

MIB = 2**20


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def read(terminal: io.StringIO, clock: Clock) -> None:
    with Progress("weights read", 4 * MIB, terminal, clock) as progress:
        for _ in range(4):
            clock.now += 0.5
            progress.note(MIB)


def test_a_terminal_shows_a_bar_that_is_gone_at_the_end() -> None:
    terminal = Terminal()
    read(terminal, Clock())
    frames = terminal.getvalue().split("\r\x1b[K")
    assert frames[2].endswith("50%  2.0 MiB of 4.0 MiB")
    assert frames[2].count("█") == frames[2].count("░") == 15
    assert frames[-1] == "", "the line is empty in the end"


def test_a_file_gets_no_bar_and_the_log_one_line(caplog: pytest.LogCaptureFixture) -> None:
    file = io.StringIO()
    with caplog.at_level(logging.INFO):
        read(file, Clock())
    assert file.getvalue() == ""
    assert [record.getMessage() for record in caplog.records] == ["weights read: 4.0 MiB in 2.0 s"]


def test_what_fails_is_not_told_as_done(caplog: pytest.LogCaptureFixture) -> None:
    terminal = Terminal()
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(ZeroDivisionError),
        Progress("weights read", MIB, terminal),
    ):
        raise ZeroDivisionError
    assert not caplog.records
    assert terminal.getvalue() == "\r\x1b[K"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.5 KiB"),
        (942 * MIB, "942 MiB"),
        (1024 * MIB - 1, "1.0 GiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_bytes_are_shown_in_two_or_three_digits(count: int, text: str) -> None:
    assert shown_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(690_304, "690,304"), (1_500_000, "1.5 M"), (134_515_008, "135 M"), (7_600_000_000, "7.6 G")],
)
def test_counts_are_shown_shortly(count: int, text: str) -> None:
    assert shown_count(count) == text
