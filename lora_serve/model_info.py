"""What the workers tell of the model that they have loaded."""

from __future__ import annotations

from dataclasses import dataclass, field

from lora_serve.kv_groups import KVGroup


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts of a loaded model.

    fingerprint: over weights, dtype, KV layout and numerics; in every block's identity.
    lora_modules: (out_features, in_features) of each projection an adapter may change.
    num_blocks: size of the KV pool that the workers made. kv_groups: whose blocks these may be.
    kv_block_bytes, kv_layout: size of a record of kv_saves (a block of each group), and what else
        its bytes depend on; two engines can exchange records only if both are equal.
    is_asynchronous: whether a step runs while its caller goes on.
    architecture, device, num_threads, num_parameters: for people, and for /server_info.
    weights: in which format they were stored; for people.
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
    kv_block_bytes: int = 0
    kv_layout: bytes = b""
    is_asynchronous: bool = False
    architecture: str = ""
    device: str = ""
    num_threads: int = 0
    num_parameters: int = 0
    weights: str = ""
