"""A prompt of embeddings from its payload: base64 of torch.save, or of safetensors.

The sender may be hostile. Nothing in it is executed or expanded: shapes are bounded by the
model's limits and by the bytes that were really sent before a single value is copied.

numpy rounds here, to torch's bits: a server's API process imports no torch, which would take
seconds of its start.
"""

from __future__ import annotations

import base64

import numpy as np
from safetensors import SafetensorError

from lora_serve.errors import InvalidRequestError, PromptTooLongError
from lora_serve.prompts import EmbedsPrompt
from lora_serve.server.openai.stored_tensor import DTYPES, StoredTensor, read_one_tensor

_PARAM = "prompt_embeds"
_MAX_SAFETENSORS_HEADER = 4096


def decode_prompt_embeds(
    payload: str, *, hidden_size: int, dtype: str, max_tokens: int
) -> EmbedsPrompt:
    """The rows of a payload, rounded to the model's dtype.

    Args:
        dtype: the model's, "float32", "bfloat16" or "float16".
        max_tokens: most rows that are accepted.

    Raises:
        InvalidRequestError: what is wrong with the payload, whatever it holds.
    """
    tensor = _without_batch_dimension(_read(payload))
    _check_shape(tensor.shape, hidden_size, max_tokens)
    rows = _rows(tensor)
    rounded, is_finite = _rounded(rows, dtype)
    _check_finite(rows, is_finite, dtype)
    return EmbedsPrompt(len(rounded), rounded.tobytes())


def _refusal(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"`prompt_embeds` {reason}", _PARAM)


def _read(payload: str) -> StoredTensor:
    try:
        data = base64.b64decode(payload, validate=True)
    except ValueError as error:
        raise _refusal(f"must be base64 with the standard alphabet: {error}") from error
    try:
        return read_one_tensor(data, _MAX_SAFETENSORS_HEADER)
    except (ValueError, SafetensorError) as error:
        raise _refusal(f"could not be deserialized as a torch tensor: {error}") from error


def _without_batch_dimension(tensor: StoredTensor) -> StoredTensor:
    if len(tensor.shape) != 3 or tensor.shape[0] != 1:
        return tensor
    return StoredTensor(
        tensor.dtype, tensor.shape[1:], tensor.strides[1:], tensor.offset, tensor.data
    )


def _check_shape(shape: tuple[int, ...], hidden_size: int, max_tokens: int) -> None:
    if len(shape) != 2:
        raise _refusal(
            "must be a 2D tensor of shape (num_tokens, hidden_size); "
            f"got shape ({', '.join(map(str, shape[:8]))})"
        )
    if shape[1] != hidden_size:
        raise _refusal(
            f"hidden_size {shape[1]} does not match the model's hidden_size {hidden_size}."
        )
    if shape[0] < 1:
        raise _refusal(f"must have at least one row, got {shape[0]}")
    if shape[0] > max_tokens:
        raise PromptTooLongError(
            f"`prompt_embeds` has {shape[0]} rows, more than the model's context of {max_tokens} "
            "tokens; send fewer",
            _PARAM,
        )


def _rows(tensor: StoredTensor) -> np.ndarray:
    """The tensor's values as floats, contiguous. Its shape has been checked."""
    if not tensor.is_of_known_dtype:
        accepted = ", ".join(f"torch.{name}" for _, _, name, _ in DTYPES)
        raise _refusal(f"must be of dtype {accepted}; got {tensor.dtype[:40]}")
    try:
        values = tensor.values()
    except ValueError as error:
        raise _refusal(str(error)) from error
    if tensor.torch_name == "bfloat16":
        return (values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return values


def _rounded(rows: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The values in the model's dtype, bfloat16 as its bits, and which of them are finite.

    Each is rounded to float32 first, as torch does it.
    """
    with np.errstate(over="ignore"):
        floats = rows.astype(np.float32)
        if dtype == "bfloat16":
            bits = floats.view(np.uint32)
            rounded = ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype(np.uint16)  # ties to even
            return rounded, np.isfinite(rows) & (rounded & 0x7F80 != 0x7F80)
        rounded = floats.astype(dtype)
    return rounded, np.isfinite(rounded)


def _check_finite(rows: np.ndarray, is_finite: np.ndarray, dtype: str) -> None:
    is_broken = ~is_finite.all(axis=1)
    if not is_broken.any():
        return
    row = int(is_broken.argmax())
    if np.isfinite(rows[row]).all():
        raise _refusal(f"must fit the model's {dtype}; row {row} has a value that is too large")
    raise _refusal(f"must be finite; row {row} has NaN or infinity")
