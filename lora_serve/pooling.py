"""How hidden states become an embedding: as the user asked for it, and the arithmetic.

A mean must have the same bits however its prompt was cut into chunks. So each value is taken as a
whole number of units of 2**-26: sums of whole numbers are exact, and the same in any order. A
value of a 16-bit type is a whole number of units unless it is smaller than 2**-16 or so.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from lora_serve.errors import InvalidRequestError, RequestFailedError

SequencePoolingType: TypeAlias = Literal["LAST", "MEAN"]
PoolingType: TypeAlias = Literal["LAST", "MEAN", "ALL"]

UNITS = 2.0**26  # in 1
LARGEST_VALUE = 2.0**16  # above float16's largest
MAX_ROWS = 2**20  # so that no sum of a column leaves 64 bits
MAX_TOKEN_VALUES = 2**23  # of all tokens' hidden states, which wait for the last one's


NO_NUMBERS = (
    "the model's hidden states of this input are no finite numbers, so it has no embedding; "
    "another --dtype may hold them"
)
NO_MEAN = (
    "the model's hidden states of this input have values that are no finite numbers, or above "
    f"{LARGEST_VALUE:.0f}, the largest that a mean is taken of, so it has no embedding; "
    "pooling_type LAST takes any that another --dtype may hold"
)


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True):
    """One request's choices.

    pooling_type: LAST takes the hidden state of the last token, MEAN the mean over all tokens, ALL
        that of each token, one after the other.
    normalize: to length 1. dimensions: only so many of the first values, all if None; they are cut
        before the rest is done.
    """

    pooling_type: PoolingType = "LAST"
    normalize: bool = True
    dimensions: int | None = None

    @property
    def needs_all_rows(self) -> bool:
        return self.pooling_type != "LAST"

    def verify(self, hidden_size: int, num_tokens: int) -> None:
        """Raise InvalidRequestError for the first field that does not fit model or prompt."""
        dimensions = self.dimensions
        if dimensions is not None and not 1 <= dimensions <= hidden_size:
            raise InvalidRequestError(
                f"dimensions must be in [1, {hidden_size}], the model's hidden size, got "
                f"{dimensions}",
                "dimensions",
            )
        if self.pooling_type == "ALL" and num_tokens * hidden_size > MAX_TOKEN_VALUES:
            raise InvalidRequestError(
                f"the input has {num_tokens} tokens with {hidden_size} values each, of which at "
                f"most {MAX_TOKEN_VALUES} together are given; shorten it",
                "input",
            )
        if self.pooling_type == "MEAN" and num_tokens > MAX_ROWS:
            raise InvalidRequestError(
                f"the input has {num_tokens} tokens, a mean is taken of {MAX_ROWS} at most; "
                "shorten it",
                "input",
            )


LAST_NORMALISED = PoolingParams()


def sums_added(some: bytes, others: bytes) -> bytes:
    """The sums over both of what `RequestStepOutput.hidden_sums` gave of disjoint rows."""
    return (np.frombuffer(some, np.int64) + np.frombuffer(others, np.int64)).tobytes()


def embedding(pooled: bytes, params: PoolingParams, num_tokens: int) -> bytes:
    """The values of an embedding, or of each token's, as little-endian float32.

    Args:
        pooled: the hidden state of the last token, float32, the sums of all, or all.

    Raises:
        RequestFailedError: there is a value in it that is no number.
    """
    is_mean = params.pooling_type == "MEAN"
    values = _mean(pooled, num_tokens) if is_mean else np.frombuffer(pooled, "<f4")
    if params.pooling_type == "ALL":
        values = values.reshape(num_tokens, -1)
    values = values[..., : params.dimensions].astype(np.float64)
    if not np.isfinite(values).all():
        raise RequestFailedError(NO_MEAN if is_mean else NO_NUMBERS)
    if params.normalize:
        lengths = np.sqrt(np.square(values).sum(axis=-1, keepdims=True))
        values = values / np.where(lengths, lengths, 1.0)
    return values.astype("<f4").tobytes()


def _mean(sums: bytes, num_rows: int) -> npt.NDArray[np.float64]:
    numbers = np.frombuffer(sums, np.int64)
    num_unsummed = numbers[-1]
    return np.where(num_unsummed, np.nan, numbers[:-1] / (UNITS * num_rows))
