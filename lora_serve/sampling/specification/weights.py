"""A token's weight: its probability up to a factor, as a whole number, so that sums are exact.

The greedy token weighs 2**40 = `UNIT`, any other `floor(UNIT * e**((logit - peak) / T))`. Sums
of whole numbers are the same in any order, by any vector, thread or library: that is why a native
backend draws the same token as this and gives the same log-probability, to the bit. What is less
likely than the greedy token by 12 orders of magnitude weighs nothing.

The exponential is spelled out, one rounding after each operation, because every library has its
own: n ln 2 is taken away in two parts, then a polynomial of degree 6, fitted here for the least
relative error with both its lowest terms held at 1. Error below 2 units of the last place.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatRow = NDArray[np.float32]
Units = NDArray[np.int64]

UNIT = 1 << 40
MAX_VOCAB_SIZE = 1 << 22  # of which all weights together still fit 63 bits
LEAST_EXPONENT = np.float32(-64)  # e**-64 is far below one unit, and no denormal number

_SLICE = 16384  # all 151,936 at once takes four times as long (page faults)
LOG2_E = np.float32(1.44269504)
LN2_HIGH = np.float32(0.693359375)  # 9 bits: times a small integer it is exact
LN2_LOW = np.float32(-2.12194442e-4)
POLYNOMIAL = tuple(  # from the highest power down
    np.float32(c)
    for c in (1.38436409e-3, 8.37416388e-3, 4.16680016e-2, 0.166664317, 0.49999994, 1.0, 1.0)
)


def relative_weights(row: FloatRow, scale: np.float32) -> FloatRow:
    """e**((row - max(row)) * scale): 1 for the most likely.

    Args:
        row: (V), comparable, with an entry above -inf. scale: 1 / temperature.
    """
    peak = row.max()
    weights = np.empty_like(row)
    for start in range(0, len(row), _SLICE):
        part = slice(start, start + _SLICE)
        weights[part] = _exponential((row[part] - peak) * scale)
    return weights


def units(weights: FloatRow) -> Units:
    """Relative weights as whole numbers of `UNIT`."""
    return (weights * np.float32(UNIT)).astype(np.int64)


def _exponential(x: FloatRow) -> FloatRow:
    """e**x for x of at most 0, from LEAST_EXPONENT on."""
    x = np.maximum(x, LEAST_EXPONENT)
    n = np.rint(x * LOG2_E)
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    p = np.full_like(r, POLYNOMIAL[0])
    for c in POLYNOMIAL[1:]:
        p = p * r + c
    return np.ldexp(p, n.astype(np.int32))
