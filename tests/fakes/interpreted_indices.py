"""Triton's interpreter with loops over what a program counts, whatever versions of it and of numpy.

The interpreter keeps a number as an array of one element. Triton 3.6 asks Python for its value,
which numpy 2.5 refuses.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Patch the interpreter of this process for good."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index
