"""The table of rotary angles, for the ways of stretching it that checkpoints use.

Computed once. Frequencies, cos and sin are taken in float64, but an angle is rounded to float32, as
in the code that checkpoints were trained with: at position 8000 that moves it by 1e-4.

Source: RoFormer, arxiv.org/abs/2104.09864; YaRN, arxiv.org/abs/2309.00071; Llama 3.1's own scaling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
class RopeSpec:
    """theta: the base. scaling: None for the plain table."""

    theta: float = 10000.0
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None


def rotary_table(rope: RopeSpec, head_size: int, num_positions: int) -> Tensor:
    """(num_positions, head_size), float32: row p is cos(p f) for each f, then sin(p f)."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float64) / head_size
    frequencies = rope.theta**-exponents
    match rope.scaling:
        case LinearScaling(factor):
            frequencies /= factor
        case Llama3Scaling():
            frequencies = _llama3(frequencies, rope.scaling)
        case YarnScaling():
            frequencies = _yarn(frequencies, rope.theta, rope.scaling)
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = (positions[:, None] * frequencies.to(torch.float32)).to(torch.float64)
    amplitude = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0
    table = torch.cat((angles.cos(), angles.sin()), dim=-1) * amplitude
    return table.to(torch.float32)


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
