"""What kernels do: a protocol for each group of them that shares a private format.

T tokens, R requests, H hidden size, D head size; Hq query heads share Hkv key heads; "dtype" is the
model's. `ops/reference/` gives each kernel's meaning in plain torch, and the others are tested
against it. The rule that all of them keep: an output element is summed in an order that depends on
absolute position only, never on how many rows, which other rows, or which chunk it came with.

All arithmetic is in float32 and rounded to the dtype once, at the end of a kernel. Kernels know no
request: how tokens are sampled from logits is `lora_serve.sampling`'s.
"""

from __future__ import annotations

from lora_serve.ops.contract.attention import AttentionKernels
from lora_serve.ops.contract.experts import ChosenExperts, ExpertKernels
from lora_serve.ops.contract.linear import FuseGated, LinearKernels, PackCodes, PackQuantized
from lora_serve.ops.contract.lora import LoRAKernels, LoRAPart, PlanPairs
from lora_serve.ops.contract.ops import Ops, Runtime, StepPlans
from lora_serve.ops.contract.packed import (
    AttentionPlan,
    LoRAPlan,
    PackedAdapter,
    PackedExperts,
    PackedLinear,
)
from lora_serve.ops.contract.rowwise import RowwiseKernels
from lora_serve.ops.contract.screening import (
    PackScreen,
    Screen,
    ScreenedArgmax,
    ScreenedTokens,
    TokenChoice,
)

__all__ = [
    "AttentionKernels",
    "AttentionPlan",
    "ChosenExperts",
    "ExpertKernels",
    "FuseGated",
    "LinearKernels",
    "LoRAKernels",
    "LoRAPart",
    "LoRAPlan",
    "Ops",
    "PackCodes",
    "PackQuantized",
    "PackScreen",
    "PackedAdapter",
    "PackedExperts",
    "PackedLinear",
    "PlanPairs",
    "RowwiseKernels",
    "Runtime",
    "Screen",
    "ScreenedArgmax",
    "ScreenedTokens",
    "StepPlans",
    "TokenChoice",
]
