"""How the rows of a tensor lie, which the native side takes on trust."""

from __future__ import annotations

from torch import Tensor


def token_stride(rows: Tensor, head_size: int) -> int:
    """Elements from one token's heads to the next one's; the heads themselves lie side by side."""
    token, head, element = rows.stride()
    side_by_side = element == 1 and (head == head_size or rows.shape[1] == 1)
    assert side_by_side, f"heads of {head_size} at strides {rows.stride()}"
    return token
