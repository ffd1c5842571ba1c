"""The model's part in every KV block's identity."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from lora_serve.identity import framed
from lora_serve.models.spec import DecoderSpec
from lora_serve.models.weights import bytes_digest

_SCHEME = b"lora-serve/model/1"


def model_fingerprint(
    spec: DecoderSpec,
    dtype: torch.dtype,
    weights_digest: bytes,
    cos_sin: Tensor,
    numerics: str,
    block_size: int,
) -> bytes:
    """32 bytes that change whenever KV may: with weights, facts, dtype, kernels or block layout.

    cos_sin, the rotary table, is in it because its bits come from the machine's own cos and sin.
    """
    return hashlib.sha256(
        framed(
            _SCHEME,
            repr(spec).encode(),
            str(dtype).encode(),
            weights_digest,
            bytes_digest(cos_sin),
            numerics.encode(),
            str(block_size).encode(),
        )
    ).digest()
