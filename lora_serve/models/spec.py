"""The facts in which dense decoders differ. `families.py` finds them, `decoder.py` acts on them."""

from __future__ import annotations

from dataclasses import dataclass

from lora_serve.layers.rotary import RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """One dense decoder; its repr is part of the model fingerprint.

    qkv_bias, output_bias: whether q k v, and o, have a bias. qk_norm: RMS norm of each head's q
    and k before rotation. sliding_window: query p sees (p - sliding_window, p], in all layers.
    max_positions: with what the rotary scaling adds to what was trained.
    dtype: as the checkpoint's config names it, None if it does not.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    rope: RopeSpec
    max_positions: int
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    sliding_window: int | None
    dtype: str | None
