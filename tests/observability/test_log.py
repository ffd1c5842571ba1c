from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from lora_serve.config import LogConfig
from lora_serve.errors import ConfigError
from lora_serve.observability.log import JsonFormatter, with_fields

SCRIPT = """
import logging
from lora_serve.config import LogConfig
from lora_serve.observability.log import set_up_logging, with_fields

set_up_logging(LogConfig(log_level="{level}", log_format="{form}"), "server", label="{label}")
logger = logging.getLogger("lora_serve.somewhere")
logger.info("of little weight")
logger.warning("two\\nlines", extra=with_fields(lora="a"))
"""


def logged(level: str, form: str, label: str = "") -> list[str]:
    script = SCRIPT.format(level=level, form=form, label=label)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert not done.stdout
    return done.stderr.splitlines()


def test_json_lines_hold_one_object_each_with_the_values_of_the_line() -> None:
    quiet, told = (json.loads(line) for line in logged("info", "json"))
    assert quiet["message"] == "of little weight"
    assert quiet["level"] == "info"
    time = told.pop("time")
    assert time.endswith("Z")
    assert told == {
        "lora": "a",
        "level": "warning",
        "logger": "lora_serve.somewhere",
        "process": "server",
        "message": "two\nlines",
    }


def test_text_lines_begin_with_a_time_and_no_less_severe_ones_are_there() -> None:
    lines = logged("warning", "text")
    assert len(lines) == 2
    assert lines[0].split(" ", 2)[2] == "WARNING lora_serve.somewhere: two"


def test_a_text_line_tells_by_its_label_which_of_like_processes_wrote_it() -> None:
    told, _ = logged("warning", "text", "rank 1")
    assert told.split(" ", 2)[2] == "WARNING [rank 1] lora_serve.somewhere: two"


def test_no_value_of_a_line_takes_the_place_of_its_message() -> None:
    extra = with_fields(message="forged", level="none", size=3)
    record = logging.getLogger("x").makeRecord(
        "x", logging.INFO, "f", 1, "said", (), None, extra=dict(extra)
    )
    line = json.loads(JsonFormatter("engine").format(record))
    assert (line["message"], line["level"], line["size"]) == ("said", "info", 3)


def test_a_traceback_is_a_value_of_its_line() -> None:
    try:
        raise ZeroDivisionError("a bug")
    except ZeroDivisionError:
        record = logging.getLogger("x").makeRecord(
            "x", logging.ERROR, "f", 1, "failed", (), sys.exc_info()
        )
    line = json.loads(JsonFormatter("engine").format(record))
    assert line["error"].endswith("ZeroDivisionError: a bug")


def test_levels_may_be_written_as_python_writes_them() -> None:
    assert LogConfig(log_level="DEBUG").log_level == "debug"
    with pytest.raises(ConfigError, match="--log-level loud must be one of debug, info"):
        LogConfig(log_level="loud")
