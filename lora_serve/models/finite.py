"""Whether weights are finite numbers, found in a pass that costs little beside reading them.

Of inf and NaN all bits of the exponent are set. So the bits, as a whole number with a sign, are at
least those of inf; or, with the sign bit set and read without a sign, at least those of -inf.
"""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

_CHUNK = 2**17  # values: what is looked at twice stays in a core's cache

# Of each type: its bits with a sign, without, and the bits of inf.
_TYPES = MappingProxyType(
    {
        torch.float32: (torch.int32, np.int32, np.uint32, 0x7F80_0000),
        torch.float16: (torch.int16, np.int16, np.uint16, 0x7C00),
        torch.bfloat16: (torch.int16, np.int16, np.uint16, 0x7F80),
    }
)


def is_finite(weight: Tensor) -> bool:
    """Whether all its values are. weight: contiguous, on the CPU; of another dtype it is."""
    if weight.dtype not in _TYPES or not weight.numel():
        return True
    view, signed, unsigned, infinity = _TYPES[weight.dtype]
    bits = weight.view(view).flatten().numpy()
    sign = 1 << (8 * bits.itemsize - 1)
    for begin in range(0, len(bits), _CHUNK):
        chunk = bits[begin : begin + _CHUNK]
        if chunk.view(signed).max() >= infinity or chunk.view(unsigned).max() >= infinity | sign:
            return False
    return True
