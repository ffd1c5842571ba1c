"""An adapter as it was read and verified: what the control plane hands to the workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from pickle import PickleBuffer
from typing import Any


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as a checkpoint stores it: safetensors' dtype name ("F32", "BF16", "F16").

    Pickled by protocol 5, its data may go from where it lies, without a copy.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __reduce__(self) -> tuple[object, ...]:
        return RawTensor, (self.dtype, self.shape, PickleBuffer(self.data))


@dataclass(frozen=True, slots=True)
class LoRAModule:
    """The low-rank delta of one projection: y += scale * (x @ a.T) @ b.T.

    Of the embeddings x is a token, as a row of zeros with a one: its column of a is taken.

    name: as in the base checkpoint, e.g. "model.layers.0.self_attn.q_proj".
    a: (rank, in_features). b: (out_features, rank).
    """

    name: str
    rank: int
    scale: float
    a: RawTensor
    b: RawTensor


@dataclass(frozen=True, slots=True)
class ModuleBias:
    """A vector that an adapter has for the outputs of one projection.

    name: of the projection. values: (out_features). scale: y += scale * values; None: they stand in
        the place of the model's own bias.
    """

    name: str
    values: RawTensor
    scale: float | None


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Rows of the embeddings, or of the LM head, that stand in the place of the model's.

    name: of the matrix, as in the base checkpoint. token_ids: different, in any order; None: all.
    rows: (their number, hidden_size).
    """

    name: str
    token_ids: tuple[int, ...] | None
    rows: RawTensor


@dataclass(frozen=True, slots=True)
class AdapterCheckpoint:
    """One adapter, verified: `digest` is over all that shapes its delta, and where it begins.

    invocation_tokens: it acts from where these last begin in a prompt; from the first token on if
        there are none.
    token_rows: at most one of each matrix; modules are added to what stands there then.
    ignored: names of tensors of the file that are no part of it, as PEFT reads its config.
    """

    path: str
    digest: bytes
    rank: int
    num_bytes: int
    base_model: str
    modules: tuple[LoRAModule, ...] = ()
    invocation_tokens: tuple[int, ...] = ()
    token_rows: tuple[TokenRows, ...] = ()
    biases: tuple[ModuleBias, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def tensor_fields(self) -> tuple[str, ...]:
        """The names of the fields that hold tensors, whatever kinds of adapters there are."""
        names = (field.name for field in fields(self))
        return tuple(name for name in names if any(tensors_of(getattr(self, name))))

    def without_tensors(self) -> AdapterCheckpoint:
        """What is known of the adapter once its bytes may go."""
        held = self.tensor_fields
        without: dict[str, Any] = {f.name: f.default for f in fields(self) if f.name in held}
        return replace(self, **without)


def num_tensor_bytes(value: object) -> int:
    """What all tensors of an adapter, or of a part of it, take together."""
    return sum(tensor.data.nbytes for tensor in tensors_of(value))


def tensors_of(value: object) -> Iterator[RawTensor]:
    """All tensors of an adapter, or of a part of it, in the order of its fields."""
    if isinstance(value, RawTensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors_of(part)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))
