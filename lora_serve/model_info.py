"""What the workers tell of the model that they have loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import xxhash

from lora_serve.identity import framed
from lora_serve.kv_groups import KVGroup


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The two matrices of a model that have a row for each token: embeddings and LM head.

    embedding, head: their names in the checkpoint, as adapters change them.
    is_tied: whether the LM head is the embeddings, too.
    dtype: the model's. digests: of those that are stored as numbers, as `weight_digest` gives them.
    """

    embedding: str
    head: str
    size: int
    hidden_size: int
    is_tied: bool
    dtype: str = "float32"
    digests: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def lora_modules(self) -> dict[str, tuple[int, int]]:
        """What ModelInfo says of these two: a delta of embeddings takes tokens, and gives rows."""
        return {
            self.embedding: (self.hidden_size, self.size),
            self.head: (self.size, self.hidden_size),
        }


def weight_digest(dtype: str, shape: Sequence[int], data: memoryview) -> bytes:
    """Digest a weight's dtype ("bfloat16"), shape and contiguous bytes."""
    values = xxhash.xxh3_128_digest(data)
    return framed(f"torch.{dtype}".encode(), repr(tuple(shape)).encode(), values)


@dataclass(frozen=True, slots=True)
class DraftModelInfo:
    """Facts of a loaded draft model, and of its own KV pool.

    num_blocks: of block_size tokens, each with a page for each of num_groups groups of layers.
    kv_bytes, architecture, num_parameters, dtype, weights: for people; as of ModelInfo.
    """

    num_blocks: int
    block_size: int
    num_groups: int
    max_model_len: int
    kv_bytes: int = 0
    architecture: str = ""
    num_parameters: int = 0
    dtype: str = ""
    weights: str = ""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of a loaded model.

    fingerprint: over weights, dtype, KV layout and numerics; in every block's identity.
    lora_modules: (out_features, in_features) of each projection an adapter may change.
    vocabulary: of which adapters may change rows; None if they may not.
    num_blocks: size of the KV pool that the workers made. kv_groups: whose blocks these may be.
    kv_block_bytes, kv_layout: size of a record of kv_saves (a block of each group), and what else
        its bytes depend on; two engines can exchange records only if both are equal.
    is_asynchronous: whether a step runs while its caller goes on.
    architecture, device, num_threads, num_parameters: for people, and for /server_info.
    weights: in which format they were stored; for people.
    draft_model: None without any.
    """

    fingerprint: bytes
    dtype: str
    vocab_size: int
    hidden_size: int
    max_model_len: int
    num_blocks: int
    kernels: str
    kv_groups: tuple[KVGroup, ...] = (KVGroup(),)
    lora_modules: dict[str, tuple[int, int]] = field(default_factory=dict)
    vocabulary: Vocabulary | None = None
    kv_block_bytes: int = 0
    kv_layout: bytes = b""
    is_asynchronous: bool = False
    architecture: str = ""
    device: str = ""
    num_threads: int = 0
    num_parameters: int = 0
    weights: str = ""
    draft_model: DraftModelInfo | None = None
