"""A prompt of embeddings from its payload: base64 of torch.save, or of safetensors.

The sender may be hostile. Nothing in it is executed or expanded: shapes are bounded by the
model's limits and by the bytes that were really sent before a single value is copied.
"""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import torch
from safetensors import SafetensorError, deserialize

from lora_serve.errors import InvalidRequestError, PromptTooLongError
from lora_serve.prompts import EmbedsPrompt
from lora_serve.server.openai.tensor_pickle import read_tensor_pickle
from lora_serve.server.openai.torch_zip import stored_entries

_PARAM = "prompt_embeds"
_MAX_SAFETENSORS_HEADER = 4096
_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."

# What safetensors and torch's storages call them, torch's dtype, and numpy's for the same bytes.
_DTYPES = (
    ("F64", "torch.DoubleStorage", torch.float64, np.float64),
    ("F32", "torch.FloatStorage", torch.float32, np.float32),
    ("F16", "torch.HalfStorage", torch.float16, np.float16),
    ("BF16", "torch.BFloat16Storage", torch.bfloat16, np.int16),
)
_DTYPE_OF = MappingProxyType(
    {name: (dtype, bits) for *names, dtype, bits in _DTYPES for name in names}
)


@dataclass(frozen=True, slots=True)
class _StoredTensor:
    """A view of bytes that were sent.

    dtype: a key of _DTYPE_OF if it is one that is accepted. offset, strides: count values.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    data: memoryview


def decode_prompt_embeds(
    payload: str, *, hidden_size: int, dtype: str, max_tokens: int
) -> EmbedsPrompt:
    """The rows of a payload, rounded to the model's dtype.

    Args:
        dtype: the model's: "float32", "bfloat16" or "float16".
        max_tokens: most rows that are accepted.

    Raises:
        InvalidRequestError: what is wrong with the payload, whatever it holds.
    """
    tensor = _without_batch_dimension(_read(payload))
    _check_shape(tensor.shape, hidden_size, max_tokens)
    rows = _rows(tensor)
    rounded = rows.to(getattr(torch, dtype))
    _check_finite(rows, rounded, dtype)
    return EmbedsPrompt(rounded.shape[0], rounded.view(torch.uint8).numpy().tobytes())


def _refusal(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"`prompt_embeds` {reason}", _PARAM)


def _read(payload: str) -> _StoredTensor:
    try:
        data = base64.b64decode(payload, validate=True)
    except ValueError as error:
        raise _refusal(f"must be base64 with the standard alphabet: {error}") from error
    try:
        return _read_torch(data) if data.startswith(b"PK\x03\x04") else _read_safetensors(data)
    except (ValueError, SafetensorError) as error:
        raise _refusal(f"could not be deserialized as a torch tensor: {error}") from error


def _read_torch(data: bytes) -> _StoredTensor:
    entries = stored_entries(data)
    pickles = [name for name in entries if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ValueError("its zip file has no data.pkl, or several; torch.save writes one")
    prefix = pickles[0].removesuffix("data.pkl")
    if bytes(entries.get(prefix + "byteorder", b"little")) != b"little":
        raise ValueError("it was saved on a big-endian machine; only little-endian is accepted")
    tensor = read_tensor_pickle(entries[pickles[0]])
    values = entries.get(f"{prefix}data/{tensor.storage.key}")
    if values is None:
        raise ValueError("the zip entry with the tensor's values is missing")
    return _StoredTensor(tensor.storage.kind, tensor.shape, tensor.strides, tensor.offset, values)


def _read_safetensors(data: bytes) -> _StoredTensor:
    if data.startswith(_LEGACY_MAGIC):
        raise ValueError(
            "it is in torch's format of before 1.6; save it with torch.save(tensor, file) alone"
        )
    if int.from_bytes(data[:8], "little") > _MAX_SAFETENSORS_HEADER or data[8:9] != b"{":
        raise ValueError("it is neither a zip file as of torch.save nor safetensors")
    tensors = deserialize(data)  # type: ignore[no-untyped-call]
    if len(tensors) != 1:
        raise ValueError(f"it holds {len(tensors)} tensors, send one alone")
    ((_, tensor),) = tensors
    shape = tuple(tensor["shape"])
    strides = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return _StoredTensor(tensor["dtype"], shape, strides, 0, memoryview(tensor["data"]))


def _without_batch_dimension(tensor: _StoredTensor) -> _StoredTensor:
    if len(tensor.shape) != 3 or tensor.shape[0] != 1:
        return tensor
    return _StoredTensor(
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


def _rows(tensor: _StoredTensor) -> torch.Tensor:
    """The tensor's values, copied, contiguous. Its shape has been checked."""
    if tensor.dtype not in _DTYPE_OF:
        accepted = ", ".join(str(dtype) for _, _, dtype, _ in _DTYPES)
        raise _refusal(f"must be of dtype {accepted}; got {tensor.dtype[:40]}")
    dtype, bits = _DTYPE_OF[tensor.dtype]
    itemsize = np.dtype(bits).itemsize
    strides = _strides_within(tensor, len(tensor.data) // itemsize)
    values = np.ndarray(
        tensor.shape,
        bits,
        tensor.data,
        tensor.offset * itemsize,
        [stride * itemsize for stride in strides],
    )
    return torch.from_numpy(np.array(values, order="C")).view(dtype)


def _strides_within(tensor: _StoredTensor, num_stored: int) -> list[int]:
    """The strides, once the view is known to lie within the stored values and to repeat none."""
    num_values = math.prod(tensor.shape)
    if num_values > num_stored:
        raise _refusal(
            f"declares {num_values} values but holds {num_stored}; save tensor.contiguous()"
        )
    axes = list(zip(tensor.shape, tensor.strides, strict=True))
    strides = [stride if size > 1 else 0 for size, stride in axes]  # of size 1 it may be anything
    last = tensor.offset + sum((size - 1) * stride for size, stride in axes)
    if min(tensor.offset, *strides) < 0 or last >= num_stored:
        raise _refusal(f"reaches beyond the {num_stored} values that it holds")
    return strides


def _check_finite(rows: torch.Tensor, rounded: torch.Tensor, dtype: str) -> None:
    is_broken = ~rounded.isfinite().all(dim=1)
    if not is_broken.any():
        return
    row = int(is_broken.nonzero()[0])
    if rows[row].isfinite().all():
        raise _refusal(f"must fit the model's {dtype}; row {row} has a value that is too large")
    raise _refusal(f"must be finite; row {row} has NaN or infinity")
