"""Dequantises the blocks of GGUF's tensor types, to the bit as the format's own library does.

    weight = d q            Q4_0 Q5_0 Q8_0      d, m: float16, of a block
    weight = d q + m        Q4_1 Q5_1
    weight = (d s) q - m t  Q4_K Q5_K           s, t: 6 bits, of 32 of a block's 256 values
    weight = (d s) q        Q6_K                s: 8 bits, of 16 values

All in float32, where each product is exact, so that only the sums are rounded. A function takes
(N, bytes of a block), uint8, and gives (N, values of a block), float32.

Source: github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/quants.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
_SIXTEEN = np.uint8(16)


def _half(blocks: Bytes, begin: int) -> Floats:
    """(N, 1): the float16 at byte `begin` of each block."""
    return np.ascontiguousarray(blocks[:, begin : begin + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """(N, n) -> (N, 2 n): the low halves of all bytes, then the high ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _fifth_bits(bits: Bytes) -> Bytes:
    """(N, 4) -> (N, 32): 16 where the value's bit is set."""
    return np.unpackbits(bits, axis=-1, bitorder="little") * _SIXTEEN


def _q4_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8)


def _q4_1(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]).astype(np.float32) + _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Floats:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (codes.astype(np.float32) - 16)


def _q5_1(blocks: Bytes) -> Floats:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _half(blocks, 0) * codes.astype(np.float32) + _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Floats:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _six_bit_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """(N, 12) -> s, t: (N, 8, 1) each.

    Bytes 0-3 and 4-7 hold six bits of the first four, and above them two of the last four, whose
    other bits are the halves of bytes 8-11.
    """
    first, second, halves = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    s = np.concatenate((first & 63, (halves & 15) | (first >> 6 << 4)), axis=-1)
    t = np.concatenate((second & 63, (halves >> 4) | (second >> 6 << 4)), axis=-1)
    return s.astype(np.float32)[..., None], t.astype(np.float32)[..., None]


def _of_32_values(blocks: Bytes, codes: Bytes) -> Floats:
    """Q4_K and Q5_K of their codes (N, 8, 32)."""
    s, t = _six_bit_scales(blocks[:, 4:16])
    scales, offsets = _half(blocks, 0)[..., None] * s, _half(blocks, 2)[..., None] * t
    values: Floats = scales * codes.astype(np.float32) - offsets
    return values.reshape(len(blocks), 256)


def _q4_k(blocks: Bytes) -> Floats:
    return _of_32_values(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(blocks: Bytes) -> Floats:
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    shifts = np.arange(8, dtype=np.uint8)[:, None]  # the i-th 32 values have bit i of all 32 bytes
    high = blocks[:, None, 16:48] >> shifts & np.uint8(1)
    return _of_32_values(blocks, codes | high * _SIXTEEN)


def _q6_k(blocks: Bytes) -> Floats:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    codes = (low | high << 4).reshape(-1, 16, 16).astype(np.float32) - 32
    scales = blocks[:, 192:208].view(np.int8).astype(np.float32)
    values: Floats = (_half(blocks, 208) * scales)[..., None] * codes
    return values.reshape(len(blocks), 256)


DEQUANTIZERS: Mapping[str, Callable[[Bytes], Floats]] = MappingProxyType(
    {
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q8_0": _q8_0,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
    }
)
