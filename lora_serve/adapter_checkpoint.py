"""An adapter as it was read and verified: what the control plane hands to the workers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as a checkpoint stores it: safetensors' dtype name ("F32", "BF16", "F16")."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


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
    modules: tuple[LoRAModule, ...]
    invocation_tokens: tuple[int, ...] = ()
    token_rows: tuple[TokenRows, ...] = ()
    biases: tuple[ModuleBias, ...] = ()
    ignored: tuple[str, ...] = ()
