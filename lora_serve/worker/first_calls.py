"""Asks torch's functions for one value each, before several threads ask at once.

MKL gets its functions ready at their first call. Where that comes from two threads of torch's at
once, one of them may get values of half the digits, of that call alone (seen with torch 2.13 in one
process of four, with threads that sleep): an answer that no other process would give.
"""

from __future__ import annotations

import torch

_NAMES = (
    "acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "log", "log10",
    "log1p", "log2", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh",
)  # fmt: skip


def call_functions_once() -> None:
    """One value is one thread's work."""
    for dtype in (torch.float32, torch.float64):
        value = torch.full((1,), 0.5, dtype=dtype)
        for name in _NAMES:
            getattr(torch, name)(value)
