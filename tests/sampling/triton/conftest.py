"""The sampling kernels run as `tests/ops/triton` runs the others."""

from __future__ import annotations

from tests.ops.triton.conftest import dtype, ops, silent_overflow

__all__ = ["dtype", "ops", "silent_overflow"]
