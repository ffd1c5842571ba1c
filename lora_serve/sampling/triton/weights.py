"""Logits as keys that order them, as weights and as whole numbers: the words of sampling kernels.

The operations are those of specification/weights.py, top.py and draw.py, each rounded once or
never, so the bits are the same. Knows no row's table and launches nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lora_serve.sampling.specification.philox import RANDOM_BITS
from lora_serve.sampling.specification.weights import (
    LEAST_EXPONENT,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    MAX_VOCAB_SIZE,
    POLYNOMIAL,
    UNIT,
)

# A key holds what is compared in its upper bits, and below it an id, the lowest of which is first.
ID_BITS = tl.constexpr(MAX_VOCAB_SIZE.bit_length() - 1)
LAST_ID = tl.constexpr(MAX_VOCAB_SIZE - 1)

_LARGEST = tl.constexpr(3.4028234663852886e38)  # of float32
_NEAREST = tl.constexpr(1.5 * 2**23)  # added and taken away, it leaves the nearest whole number
_LEAST_EXPONENT = tl.constexpr(float(LEAST_EXPONENT))
_LOG2_E = tl.constexpr(float(LOG2_E))
_LN2_HIGH = tl.constexpr(float(LN2_HIGH))
_LN2_LOW = tl.constexpr(float(LN2_LOW))
_C6, _C5, _C4, _C3, _C2, _C1, _C0 = (tl.constexpr(float(c)) for c in POLYNOMIAL)
_UNIT = tl.constexpr(float(UNIT))
_HALF = tl.constexpr(27)  # bits of a random number's lower part
_LOWER_HALF = tl.constexpr((1 << _HALF.value) - 1)
_RANDOM_BITS = tl.constexpr(RANDOM_BITS)


@triton.jit
def read_logits(logits_ptr, changed_ptr, row, changed_row, column, VOCAB: tl.constexpr):
    """`top.comparable` of a row's logits, or of what it made of them where changed_row is not -1.

    -0.0 becomes 0.0, its equal; what lies beyond the vocabulary is -inf.
    """
    is_there = column < VOCAB
    if changed_row < 0:
        x = tl.load(logits_ptr + row.to(tl.int64) * VOCAB + column, mask=is_there, other=0.0)
        x = x.to(tl.float32)
    else:
        x = tl.load(changed_ptr + changed_row * VOCAB + column, mask=is_there, other=0.0)
    x = tl.where((x == x) & is_there, x, -float("inf"))
    return tl.minimum(x, _LARGEST) + 0.0


@triton.jit
def logit_key(logit, token_id):
    """Int64: the larger logit, then the lower id, has the larger key."""
    bits = logit.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered.to(tl.int64) << ID_BITS) | (token_id ^ LAST_ID)


@triton.jit
def logit_of(key):
    ordered = (key >> ID_BITS).to(tl.int32)
    bits = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def weight_key(weight, token_id):
    bits = weight.to(tl.int32, bitcast=True)
    return (bits.to(tl.int64) << ID_BITS) | (token_id ^ LAST_ID)


@triton.jit
def weight_of(key):
    return (key >> ID_BITS).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def id_of(key):
    return (key & LAST_ID) ^ LAST_ID


@triton.jit
def relative_weight(difference, scale, least):
    """e**(difference * scale), or 0 where that is below `least`.

    difference: a logit less the row's largest.
    """
    x = tl.maximum(difference * scale, _LEAST_EXPONENT)
    n = (x * _LOG2_E + _NEAREST) - _NEAREST
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    p = r * _C6 + _C5
    p = p * r + _C4
    p = p * r + _C3
    p = p * r + _C2
    p = p * r + _C1
    p = p * r + _C0
    power_of_two = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    weight = p * power_of_two
    return tl.where(weight < least, 0.0, weight)


@triton.jit
def units(weight):
    return (weight * _UNIT).to(tl.int64)


@triton.jit
def share_of(total, random):
    """floor(total * random / 2**RANDOM_BITS), in 64 bits, for a total below 2**62."""
    a = total >> 31
    b = total & 0x7FFFFFFF
    c = random >> _HALF
    d = random & _LOWER_HALF
    # total * random = (a c << 31 + _HALF) + (a d << 31) + (b c << _HALF) + b d
    upper = (a * c) << (31 + _HALF - _RANDOM_BITS)
    lower = ((a * d) << (31 - _HALF)) + b * c + ((b * d) >> _HALF)
    return upper + (lower >> (_RANDOM_BITS - _HALF))


@triton.jit
def float_in(word):
    """The float in the lower half of a table's word."""
    return word.to(tl.int32).to(tl.float32, bitcast=True)
