"""Triton's interpreter without the work that it does again for each call of a device function.

Before a kernel is launched, and before each call of a function within it, the interpreter goes
through all of `triton.language` and puts its own functions in. That took most of the time of small
kernels. In a process that only interprets they may as well stay.
"""

from __future__ import annotations

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
