"""Takes the blocks of GGUF's quantised types apart: whole numbers, scales and offsets.

    weight = d q            Q4_0 Q5_0 Q8_0      d, m: float16, of a block
    weight = d q + m        Q4_1 Q5_1
    weight = (d s) q - m t  Q4_K Q5_K           s, t: 6 bits, of 32 of a block's 256 values
    weight = (d s) q        Q6_K                s: 8 bits, of 16 values

All in float32, where each product is exact, so that only the sums are rounded: what `dequantized`
gives is to the bit what the format's own library does. This is the specification; files are read by
`lora_serve.ops.cpu.ggml_blocks`, to the same bits.

Source: github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/quants.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from lora_serve.ops.quantization import CodeFormat

Bytes = NDArray[np.uint8]
Codes = NDArray[np.int8]
Floats = NDArray[np.float32]
_SIXTEEN = np.uint8(16)


@dataclass(frozen=True, slots=True)
class Blocks:
    """weight = scale * code + offset, of N blocks with G groups of V values each.

    codes: (N, G, V). scales: (N, G). offsets: likewise; None: 0.
    """

    codes: Codes
    scales: Floats
    offsets: Floats | None = None

    def dequantized(self) -> Floats:
        """(N, G V), float32."""
        values: Floats = self.scales[..., None] * self.codes.astype(np.float32)
        if self.offsets is not None:
            values += self.offsets[..., None]
        return values.reshape(len(values), -1)


@dataclass(frozen=True, slots=True)
class BlockType:
    """apart: takes (N, bytes of a block), uint8. form: the codes that kernels take."""

    apart: Callable[[Bytes], Blocks]
    form: CodeFormat
    has_offsets: bool

    def kept(self, blocks: Bytes) -> Blocks:
        """The blocks with codes in the range that `form` has, if all are in its bits."""
        found = self.apart(blocks)
        if self.form.bits == 8 or found.offsets is None:
            return found
        # Codes from 0 to 15 become -8 to 7.
        return Blocks(found.codes - np.int8(8), found.scales, found.offsets + 8 * found.scales)


def _half(blocks: Bytes, begin: int) -> Floats:
    """(N, 1): the float16 at byte `begin` of each block."""
    return np.ascontiguousarray(blocks[:, begin : begin + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """(N, n) -> (N, 2 n): the low halves of all bytes, then the high ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=-1)


def _fifth_bits(bits: Bytes) -> Bytes:
    """(N, 4) -> (N, 32): 16 where the value's bit is set."""
    return np.unpackbits(bits, axis=-1, bitorder="little") * _SIXTEEN


def _codes(unsigned: Bytes, above: int = 0) -> Codes:
    """(N, V) -> (N, 1, V), each less `above`."""
    return (unsigned.view(np.int8) - np.int8(above))[:, None]


def _q4_0(blocks: Bytes) -> Blocks:
    return Blocks(_codes(_nibbles(blocks[:, 2:]), 8), _half(blocks, 0))


def _q4_1(blocks: Bytes) -> Blocks:
    return Blocks(_codes(_nibbles(blocks[:, 4:])), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Bytes) -> Blocks:
    unsigned = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return Blocks(_codes(unsigned, 16), _half(blocks, 0))


def _q5_1(blocks: Bytes) -> Blocks:
    unsigned = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return Blocks(_codes(unsigned), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes) -> Blocks:
    return Blocks(blocks[:, None, 2:].view(np.int8), _half(blocks, 0))


def _six_bit_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """(N, 12) -> s, t: (N, 8) each.

    Bytes 0-3 and 4-7 hold six bits of the first four, and above them two of the last four, whose
    other bits are the halves of bytes 8-11.
    """
    first, second, halves = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    s = np.concatenate((first & 63, (halves & 15) | (first >> 6 << 4)), axis=-1)
    t = np.concatenate((second & 63, (halves >> 4) | (second >> 6 << 4)), axis=-1)
    return s.astype(np.float32), t.astype(np.float32)


def _of_32_values(blocks: Bytes, unsigned: Bytes) -> Blocks:
    """Q4_K and Q5_K of their codes (N, 8, 32)."""
    s, t = _six_bit_scales(blocks[:, 4:16])
    return Blocks(unsigned.view(np.int8), _half(blocks, 0) * s, _half(blocks, 2) * -t)


def _q4_k(blocks: Bytes) -> Blocks:
    return _of_32_values(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32))


def _q5_k(blocks: Bytes) -> Blocks:
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    shifts = np.arange(8, dtype=np.uint8)[:, None]  # the i-th 32 values have bit i of all 32 bytes
    high = blocks[:, None, 16:48] >> shifts & np.uint8(1)
    return _of_32_values(blocks, codes | high * _SIXTEEN)


def _q6_k(blocks: Bytes) -> Blocks:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)
    codes = (low | high << 4).reshape(-1, 16, 16).view(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return Blocks(codes, _half(blocks, 208) * scales)


def _block_type(name: str, apart: Callable[[Bytes], Blocks]) -> BlockType:
    bits = 4 if name.startswith("Q4") else 8
    form = CodeFormat(
        name,
        bits=bits,
        group=16 if name == "Q6_K" else 32,
        least=-(2 ** (bits - 1)),
        most=2 ** (bits - 1) - 1,
    )
    return BlockType(apart, form, has_offsets=name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K"))


BLOCK_TYPES: Mapping[str, BlockType] = MappingProxyType(
    {
        name: _block_type(name, apart)
        for name, apart in (
            ("Q4_0", _q4_0),
            ("Q4_1", _q4_1),
            ("Q5_0", _q5_0),
            ("Q5_1", _q5_1),
            ("Q8_0", _q8_0),
            ("Q4_K", _q4_k),
            ("Q5_K", _q5_k),
            ("Q6_K", _q6_k),
        )
    }
)
