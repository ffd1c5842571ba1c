"""The specification: every kernel in plain torch on the CPU, exact rather than fast.

All arithmetic is in float32, rounded to the model's dtype once at the end of each kernel. Weights
are kept in float32, so a bfloat16 model takes twice its size here.
"""

from __future__ import annotations

import torch

from lora_serve.ops import Ops
from lora_serve.ops.reference.arithmetic import TILE_ROWS
from lora_serve.ops.reference.attention import (
    KV_TILE,
    new_kv_cache,
    paged_attention,
    plan_attention,
    rotary_and_write_kv,
)
from lora_serve.ops.reference.projections import lora, pack_adapter, pack_linear, plan_lora
from lora_serve.ops.reference.quantized import linear, pack_quantized
from lora_serve.ops.reference.rowwise import (
    add_rms_norm,
    embed,
    gelu_tanh_and_mul,
    rms_norm,
    silu_and_mul,
    soft_cap,
)

__all__ = ["REFERENCE"]

REFERENCE = Ops(
    name="reference",
    numerics=f"reference-2-rows{TILE_ROWS}-kv{KV_TILE}",
    device=torch.device("cpu"),
    embed=embed,
    pack_linear=pack_linear,
    pack_quantized=pack_quantized,
    linear=linear,
    pack_adapter=pack_adapter,
    plan_lora=plan_lora,
    lora=lora,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    silu_and_mul=silu_and_mul,
    gelu_tanh_and_mul=gelu_tanh_and_mul,
    soft_cap=soft_cap,
    new_kv_cache=new_kv_cache,
    rotary_and_write_kv=rotary_and_write_kv,
    plan_attention=plan_attention,
    paged_attention=paged_attention,
)
