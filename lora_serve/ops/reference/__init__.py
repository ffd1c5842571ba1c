"""The specification: every kernel in plain torch on the CPU, exact rather than fast.

All arithmetic is in float32, rounded to the model's dtype once at the end of each kernel. Weights
are kept in float32, so a bfloat16 model takes twice its size here. Each module is one group of
`ops.contract`.
"""

from __future__ import annotations

import torch

from lora_serve.ops.contract import Ops, Runtime
from lora_serve.ops.reference import attention, experts, linear, lora, rowwise
from lora_serve.ops.reference.arithmetic import TILE_ROWS

__all__ = ["REFERENCE"]

REFERENCE = Ops.of_one_backend(
    name="reference",
    numerics=f"reference-2-rows{TILE_ROWS}-kv{attention.KV_TILE}",
    device=torch.device("cpu"),
    rowwise=rowwise,
    linears=linear,
    experts=experts,
    pack_quantized=linear.pack_quantized,
    pack_codes=linear.pack_codes,
    adapters=lora,
    attention=attention,
    runtime=Runtime("reference"),
    fuse_gated=linear.fuse_gated,
)
