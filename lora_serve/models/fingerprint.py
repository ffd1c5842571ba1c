"""The model's part in every KV block's identity."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from lora_serve.identity import framed
from lora_serve.models.base import ModelSpec
from lora_serve.models.weights import bytes_digest

_SCHEME = b"lora-serve/model/1"


def model_fingerprint(
    spec: ModelSpec,
    dtype: torch.dtype,
    weights_digest: bytes,
    rotary_tables: Sequence[Tensor],
    numerics: str,
    block_size: int,
) -> bytes:
    """32 bytes that change whenever KV may: with weights, facts, dtype, kernels or block layout.

    The rotary tables are in it because their bits come from the machine's own cos and sin.
    """
    return hashlib.sha256(
        framed(
            _SCHEME,
            spec.facts().encode(),
            str(dtype).encode(),
            weights_digest,
            *map(bytes_digest, rotary_tables),
            numerics.encode(),
            str(block_size).encode(),
        )
    ).digest()
