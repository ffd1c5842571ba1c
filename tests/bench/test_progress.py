from __future__ import annotations

import io

from lora_serve.bench.progress import Progress
from tests.bench.records import record


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_last_line_with_what_was_done_and_what_failed() -> None:
    out = io.StringIO()
    progress = Progress(3, out)
    for one in (record(), record(error="no"), record()):
        progress(one)
    progress.close()
    assert out.getvalue().startswith("3/3 requests, 1 failed, ")
    assert out.getvalue().endswith(" tokens/s\n")


def test_a_terminal_has_its_line_rewritten() -> None:
    out = Terminal()
    progress = Progress(1, out)
    progress(record())
    progress.close()
    assert out.getvalue().startswith("\r1/1 requests, ")
    assert out.getvalue().endswith("\033[K\n")
