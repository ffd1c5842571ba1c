"""Triton's interpreter for one thread at a time, without what it does again for each call.

Before a kernel is launched, and before each call of a function within it, the interpreter goes
through all of `triton.language` and puts its own functions in. That took most of the time of small
kernels. In a process that only interprets they may as well stay.

Which program of a grid is being run is a fact of the process there. So ranks that are threads take
turns, kernel by kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


def install() -> None:
    """Patch the interpreter of this process for good."""
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    modules = (language, language.core)
    patched: set[frozenset[str]] = set()

    def patch_once(function: Callable[..., object]) -> Any:
        values = function.__globals__.values()
        seen = frozenset(m.__name__ for m in modules if any(value is m for value in values))
        if seen not in patched:
            patch(function)
            patched.add(seen)
        return interpreter._LangPatchScope()  # which has nothing to restore

    interpreter._patch_lang = patch_once
    turn = threading.Lock()
    run = interpreter.GridExecutor.__call__

    def run_in_turn(kernel: Any, *args: Any, **options: Any) -> None:
        with turn:
            run(kernel, *args, **options)

    interpreter.GridExecutor.__call__ = run_in_turn
