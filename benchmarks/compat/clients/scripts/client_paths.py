"""Run the paths that a client has, and say of each whether it went.

Imports nothing but the standard library: it stands beside scripts that run in others' environments.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from collections.abc import Callable
from typing import Any

SERVER = os.environ["COMPAT_SERVER"]  # the server's address, without a path
BASE_URL = f"{SERVER}/v1"
MODEL, ADAPTER = os.environ["COMPAT_MODEL"], os.environ["COMPAT_ADAPTER"]
KEY = "no-key-needed"
QUESTION = "Name the capital of France."
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}


def run(**paths: Callable[[], Any]) -> None:
    """Run each path in turn, all on one event loop, and print a line about each."""
    with asyncio.Runner() as runner:
        for name, path in paths.items():
            try:
                done = path()
                if inspect.isawaitable(done):
                    runner.run(_until(done))
                reason = ""
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
            line = {"path": name, "reason": reason}
            print("\n@path", json.dumps(line), flush=True)


async def _until(done: Any) -> None:
    await done


def refused(kind: type[Exception], call: Callable[[], Any]) -> Exception:
    """The error that the call raises."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__}")


def check_weather(arguments: str | dict[str, Any]) -> None:
    """The arguments are what WEATHER describes."""
    read = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert set(read) == {"city", "unit"}, read
    assert read["unit"] in ("celsius", "fahrenheit"), read
