"""The nearest matrices of low rank to a delta, with how far they are from it.

Nearest in the Frobenius norm: the delta's largest singular values. They are found as eigenvalues of
its smaller Gram matrix in float64, which loses what is below 1e-7 of the largest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

EXACT = 1e-6  # relative; what rounding to float32 leaves open anyway


@dataclass(frozen=True, slots=True)
class Factors:
    """The delta is about b @ a.

    a: (rank, in), b: (out, rank), float32, contiguous. norm: of the delta. error: the norm of the
    delta - b @ a, as they are stored. rank may be 0, where the delta is.
    """

    a: Tensor
    b: Tensor
    norm: float
    error: float

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True, slots=True)
class Spectrum:
    """A delta (out, in), float64, and the singular vectors of its shorter side.

    vectors: (n, n), of the largest singular value first. tails: (n + 1), the norm of what is left
    of the delta without the first k.
    """

    delta: Tensor
    vectors: Tensor
    tails: Tensor

    def rank_for(self, error: float) -> int:
        """The lowest rank whose relative error is at most `error`."""
        return int((self.tails > error * self.tails[0]).sum())

    def factors(self, max_rank: int) -> Factors:
        """Give those of the lowest rank that is exact to float32, or of `max_rank`."""
        rank = min(self.rank_for(EXACT), max_rank)
        kept = self.vectors[:, :rank]
        if _is_wide(self.delta):
            b, a = kept, kept.T @ self.delta
        else:
            b, a = self.delta @ kept, kept.T
        # As large as each other, so that types of few exponents hold both.
        b, a = _balanced(b, a)
        error = torch.linalg.norm(self.delta - b.double() @ a.double())
        return Factors(a, b, float(torch.linalg.norm(self.delta)), float(error))


def spectrum(delta: Tensor) -> Spectrum:
    """delta: (out, in), float64, finite."""
    gram = delta @ delta.T if _is_wide(delta) else delta.T @ delta
    energies, vectors = torch.linalg.eigh(gram)  # the smallest first
    tails = energies.clamp_(min=0).cumsum(0).sqrt().flip(0)
    return Spectrum(delta, vectors.flip(1), torch.cat((tails, tails.new_zeros(1))))


def _is_wide(delta: Tensor) -> bool:
    return delta.shape[0] <= delta.shape[1]


def _balanced(b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of the same product whose columns and rows are as long as each other, in float32."""
    long_b, long_a = torch.linalg.norm(b, dim=0), torch.linalg.norm(a, dim=1)
    share = (long_a / long_b).sqrt()
    return (b * share).float().contiguous(), (a / share[:, None]).float().contiguous()
