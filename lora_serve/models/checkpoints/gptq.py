"""GPTQ: checkpoints of AutoGPTQ and GPTQModel.

    weight[n][k] = scales[g][n] * (q[k][n] - zeros[g][n])        g = g_idx[k]

q is packed along k, zeros along n, the lowest bits first. Files of the first version have zeros
that are one too small: the tools subtract 1 from each number in a word at once, so that a zero of 0
borrows from the number above it. Without act-order g is k // group, and the codes are kept.

Source: github.com/AutoGPTQ/AutoGPTQ, auto_gptq/nn_modules/qlinear/qlinear_cuda.py
github.com/ModelCloud/GPTQModel, gptqmodel/utils/model.py (convert_gptq_v2_to_v1_format_module)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from lora_serve.models.checkpoints.base import FLOATS
from lora_serve.models.checkpoints.quantized_safetensors import (
    ROW_GROUP,
    QuantizedSafetensors,
    ReadPart,
    Shapes,
    Types,
    centred,
    code_format,
    dequantized_in_order,
    for_groups,
    is_in_order,
    unpacked,
)
from lora_serve.models.settings import Settings
from lora_serve.ops.quantization import QuantizedWeight

# What is added to stored zeros, by checkpoint_format.
ZEROS_ADDED = {"gptq": 1, "gptq_v2": 0}


@dataclass(frozen=True, slots=True)
class GptqPacking:
    """group: 0 for one of a whole row."""

    bits: int
    group: int
    zeros_added: int

    def shapes(self, found: Shapes, read: ReadPart, types: Types) -> tuple[tuple[int, int], Shapes]:
        if len(found["qweight"]) != 2:
            raise ValueError(f"qweight has shape {found['qweight']}, not that of a matrix")
        words, rows = found["qweight"]
        width = words * 32 // self.bits
        groups = -(-width // (self.group or width))
        parts = {
            "scales": (groups, rows),
            "qzeros": (groups, rows * self.bits // 32),
            "g_idx": (width,),
        }
        return (rows, width), parts

    def weight(self, parts: Mapping[str, Tensor]) -> QuantizedWeight | Tensor:
        numbers = unpacked(parts["qweight"].t(), self.bits)
        ones = sum(self.zeros_added << shift for shift in range(0, 32, self.bits))
        zeros = unpacked(parts["qzeros"] + ones, self.bits).t()  # with the carry that was borrowed
        scales, of_input = parts["scales"].t(), parts.get("g_idx")
        if of_input is None or is_in_order(of_input, self.group):
            return self._codes(numbers, zeros, scales)
        return dequantized_in_order(numbers, zeros, scales, of_input)

    def _codes(self, numbers: Tensor, zeros: Tensor, scales: Tensor) -> QuantizedWeight:
        if not self.group:
            width = numbers.shape[1]
            zeros, scales = for_groups(zeros, width), for_groups(scales, width)
        form = code_format("GPTQ", self.bits, self.group or ROW_GROUP)
        return centred(numbers, zeros, scales, form)


class Gptq:
    method, name = "gptq", "GPTQ"
    required: tuple[str, ...] = ("qweight", "qzeros", "scales")
    optional: tuple[str, ...] = ("g_idx",)
    types: Mapping[str, tuple[str, ...]] = MappingProxyType(
        {"qweight": ("I32",), "qzeros": ("I32",), "scales": FLOATS, "g_idx": ("I32", "I64")}
    )

    def read(self, settings: Settings) -> GptqPacking:
        bits = settings.integer("bits")
        if bits not in (4, 8):
            settings.refuse(f"bits of {bits} are not supported; 4 and 8 are")
        group = 0 if settings.get("group_size") == -1 else settings.integer("group_size")
        version = settings.text("checkpoint_format", "gptq")
        if version not in ZEROS_ADDED:
            settings.refuse(
                f"checkpoint_format {version!r} is not supported; {', '.join(ZEROS_ADDED)} are"
            )
        return GptqPacking(
            bits if bits in (4, 8) else 4,
            group,
            ZEROS_ADDED.get(version, 1),
        )


FORMAT = QuantizedSafetensors(Gptq())
