"""The table of rotary angles, for the ways of stretching it that checkpoints use.

Computed once. Frequencies, cos and sin are taken in float64, but an angle is rounded to float32, as
in the code that checkpoints were trained with: at position 8000 that moves it by 1e-4.

Source: RoFormer, arxiv.org/abs/2104.09864; YaRN, arxiv.org/abs/2309.00071; Llama 3.1's own scaling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long waves stretched by factor, short ones kept, a linear blend between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """The scaling of YaRN: it blends over dimensions, and scales cos and sin too.

    attention_factor: multiplies cos and sin. truncate: round the blend's ends to dimensions.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class LongRopeScaling:
    """Each frequency divided by a factor of its own; short ones up to the original context.

    attention_factor: multiplies cos and sin.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """A base that grows with the context beyond the original one."""

    factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """theta: the base. scaling: None for the plain table."""

    theta: float = 10000.0
    scaling: (
        LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | DynamicScaling | None
    ) = None


@dataclass(frozen=True, slots=True)
class HeadOrder:
    """The order in which the outputs of heads are computed, where it is not the checkpoint's.

    Kernels turn the halves of a head together. Where a family turns neighbours, or the first
    channels alone, q and k get another order of channels, alike, so that their product stays.

    channels: channel i of a head is the checkpoint's channels[i]. num_heads: the first so many
        heads of a fused q k v.
    """

    channels: tuple[int, ...]
    num_heads: int

    def reorder(self, rows: Tensor, start: int = 0) -> Tensor:
        """Bring `rows` (N, ...), for the outputs from `start` on, into that order."""
        size = len(self.channels)
        num_ordered = max(0, min(self.num_heads * size - start, len(rows)))
        heads = rows[:num_ordered].unflatten(0, (-1, size))[:, list(self.channels)]
        return torch.cat((heads.flatten(0, 1), rows[num_ordered:]))


def paired_channels(head_size: int, rotary_size: int, *, interleaved: bool) -> tuple[int, ...]:
    """Channels of a head such that i turns with i + head_size / 2, for HeadOrder.

    Args:
        head_size: channels of a head.
        rotary_size: so many of them, the first, turn.
        interleaved: whether neighbours turn together, or i and i + rotary_size / 2.
    """
    turning = range(rotary_size)
    first = turning[::2] if interleaved else turning[: rotary_size // 2]
    second = turning[1::2] if interleaved else turning[rotary_size // 2 :]
    middle = (rotary_size + head_size) // 2
    return (*first, *range(rotary_size, middle), *second, *range(middle, head_size))


def rotary_table(
    rope: RopeSpec | None,
    head_size: int,
    num_positions: int,
    rotary_size: int | None = None,
    context_len: int | None = None,
) -> Tensor:
    """(num_positions, head_size), float32: row p is cos(p f) for each f, then sin(p f).

    Args:
        rope: None turns nothing.
        head_size: channels of a head.
        num_positions: rows of the table.
        rotary_size: so many channels turn, the first of either half of a head; None: all.
        context_len: the longest context, which some scalings heed; None: num_positions.
    """
    turning = 0 if rope is None else rotary_size or head_size
    table = torch.zeros(num_positions, head_size)
    cosines, sines = table.chunk(2, dim=-1)
    cosines.fill_(1.0)
    if rope is not None:
        angles, amplitude = _angles(rope, turning, num_positions, context_len or num_positions)
        # By numpy, in this thread: torch shares the work among threads, and where several are the
        # first to ask MKL for a cosine, some get one of half the digits, as others' answers do not.
        for part, compute in ((cosines, np.cos), (sines, np.sin)):
            part[:, : turning // 2] = torch.from_numpy(compute(angles.numpy())).mul_(amplitude)
    return table


def _angles(
    rope: RopeSpec, rotary_size: int, num_positions: int, context_len: int
) -> tuple[Tensor, float]:
    """Angles (num_positions, rotary_size / 2), float64, and what multiplies their cos and sin."""
    exponents = torch.arange(0, rotary_size, 2, dtype=torch.float64) / rotary_size
    frequencies = rope.theta**-exponents
    amplitude = 1.0
    match rope.scaling:
        case LinearScaling(factor):
            frequencies /= factor
        case Llama3Scaling():
            frequencies = _llama3(frequencies, rope.scaling)
        case YarnScaling():
            frequencies = _yarn(frequencies, rope.theta, rope.scaling)
            amplitude = rope.scaling.attention_factor
        case LongRopeScaling(short, long, original, amplitude):
            factors = long if context_len > original else short
            frequencies /= torch.tensor(factors, dtype=torch.float64)
        case DynamicScaling(factor, original):
            growth = factor * max(context_len, original) / original - (factor - 1)
            theta = rope.theta * growth ** (rotary_size / (rotary_size - 2))
            frequencies = theta**-exponents
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = (positions[:, None] * frequencies.to(torch.float32)).to(torch.float64)
    return angles, amplitude


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    turns = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _yarn(frequencies: Tensor, theta: float, scaling: YarnScaling) -> Tensor:
    def dimension_that_turns(turns: float) -> float:
        """Index of the (fractional) frequency that makes so many turns in the original context."""
        wave = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return len(frequencies) * math.log(wave) / math.log(theta)

    low, high = dimension_that_turns(scaling.beta_fast), dimension_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * len(frequencies) - 1)
    width = max(high - low, 0.001)
    index = torch.arange(len(frequencies), dtype=torch.float64)
    stretched = ((index - low) / width).clamp(0.0, 1.0)
    return frequencies * (1 - stretched + stretched / scaling.factor)
