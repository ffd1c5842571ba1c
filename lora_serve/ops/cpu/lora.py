"""What adapters add to linear layers, by the native kernels."""

from __future__ import annotations

from torch import Tensor

from lora_serve.ops._cpu import Backend
from lora_serve.ops.cpu import plans
from lora_serve.ops.cpu.dtypes import DTYPE_CODES
from lora_serve.ops.cpu.plans import LoraStep
from lora_serve.ops.cpu.weights import pack_adapter


class CpuLoRA:
    """`LoRAKernels` on one path. Any thread may pack an adapter, whatever the others do."""

    pack_adapter = staticmethod(pack_adapter)
    plan_lora = staticmethod(plans.plan_lora)

    def __init__(self, native: Backend) -> None:
        self._native = native

    def lora(self, y: Tensor, x: Tensor, plan: LoraStep, linear_index: int) -> None:
        if plan.native is None:
            return
        x = x.contiguous()
        assert y.is_contiguous(), "lora adds in place: y must be contiguous"
        self._native.lora(
            DTYPE_CODES[x.dtype],
            x.data_ptr(),
            y.data_ptr(),
            plan.native,
            linear_index,
            x.shape[1],
            y.shape[1],
        )
