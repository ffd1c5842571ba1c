"""FP8: checkpoints whose weights are float8 with a scale for each tensor, row or block.

    weight[n][k] = weight_scale_inv[n // B][k // C] * q[n][k]        B, C: of weight_block_size
    weight[n][k] = weight_scale[n] * q[n][k], or weight_scale * q[n][k]

GPTQModel's weight_scale_inv is what its name says, so that a weight is q / weight_scale_inv; its
config says so ("weight_scale_semantics": "inverse"). DeepSeek's, and everybody else's, multiplies.
They are dequantised: there are no kernels for float8 on CPUs. Rounding of activations that a
checkpoint asks for is left out.

Source: huggingface.co/deepseek-ai/DeepSeek-V3, README_WEIGHTS.md
github.com/ModelCloud/GPTQModel, gptqmodel/nn_modules/qlinear/fp8.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from lora_serve.models.checkpoints.base import FLOATS
from lora_serve.models.checkpoints.quantized_safetensors import (
    FLOATS8,
    QuantizedSafetensors,
    ReadPart,
    Shapes,
    Types,
    num_blocks,
    of_blocks,
    read_block,
)
from lora_serve.models.settings import Settings
from lora_serve.ops.quantization import QuantizedWeight

MULTIPLIES, DIVIDES = "", "inverse"


@dataclass(frozen=True, slots=True)
class Fp8Packing:
    """block: rows and inputs that share a scale; None: scales of rows or tensors.

    divides: whether scales do, instead of multiplying.
    """

    block: tuple[int, int] | None
    divides: bool = False

    def shapes(self, found: Shapes, read: ReadPart, types: Types) -> tuple[tuple[int, int], Shapes]:
        if len(found["weight"]) != 2:
            raise ValueError(f"weight has shape {found['weight']}, not that of a matrix")
        rows, width = found["weight"]
        scale = found.get("weight_scale_inv", found.get("weight_scale"))
        if scale is None:
            raise ValueError("weight_scale or weight_scale_inv is missing")
        if self.block is not None:
            blocks = num_blocks(self.block, rows, width)
            return (rows, width), dict.fromkeys(("weight_scale_inv", "weight_scale"), blocks)
        if scale not in ((), (1,), (rows,), (rows, 1)):
            raise ValueError(f"its scale has shape {scale}, not one of a tensor or of {rows} rows")
        return (rows, width), {}

    def weight(self, parts: Mapping[str, Tensor]) -> QuantizedWeight | Tensor:
        stored = parts["weight"].to(torch.float32)
        rows, width = stored.shape
        part = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
        scales = parts[part].to(torch.float32)
        if self.divides and bool((scales == 0).any()):
            raise ValueError(f"{part} has a scale of 0, by which no weight can be divided")
        if self.block is None:
            scales = scales.reshape(-1, 1)
        else:
            scales = of_blocks(scales, self.block, rows, width)
        return stored / scales if self.divides else stored * scales


class Fp8:
    method, name = "fp8", "FP8"
    required: tuple[str, ...] = ("weight",)
    optional: tuple[str, ...] = ("weight_scale", "weight_scale_inv", "input_scale")
    types: Mapping[str, tuple[str, ...]] = MappingProxyType(
        {"weight": FLOATS8, "weight_scale": FLOATS, "weight_scale_inv": FLOATS}
    )

    def read(self, settings: Settings) -> Fp8Packing:
        said = settings.get("weight_block_size")
        block = read_block(said)
        if said is not None and block is None:
            settings.refuse(f"weight_block_size must be two whole numbers, is {str(said)[:80]}")
        semantics = settings.text("weight_scale_semantics", MULTIPLIES)
        if semantics not in (MULTIPLIES, DIVIDES):
            settings.refuse(f"weight_scale_semantics {semantics!r} is not supported; {DIVIDES} is")
        return Fp8Packing(block, semantics == DIVIDES)


FORMAT = QuantizedSafetensors(Fp8())
