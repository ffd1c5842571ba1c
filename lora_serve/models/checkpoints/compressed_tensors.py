"""compressed-tensors: checkpoints of llm-compressor, whose weights are whole numbers or FP8.

    weight[n][k] = weight_scale[n][g] * (q[n][k] - weight_zero_point[n][g])

g is k // group, or 0 for a scale of a whole row or tensor. Numbers of 4 bits, and of 8 bits in
"pack-quantized", are packed along k, each larger by half of what its bits hold; their zero points
are packed along n. Rounding of activations that a checkpoint asks for is left out: they stay in
full precision.

Source: github.com/vllm-project/compressed-tensors
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
    ROW_GROUP,
    QuantizedSafetensors,
    ReadPart,
    Shapes,
    centred,
    code_format,
    dequantized_in_order,
    for_groups,
    is_in_order,
    unpacked,
)
from lora_serve.models.settings import Settings
from lora_serve.ops.quantization import QuantizedWeight

PACKED, INTEGERS, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
FORMATS = (PACKED, INTEGERS, FLOAT)
STRATEGIES = ("group", "channel", "tensor")


@dataclass(frozen=True, slots=True)
class CompressedPacking:
    """form: one of FORMATS. group: 0 for scales of whole rows or tensors."""

    form: str
    bits: int
    group: int

    def shapes(self, found: Shapes, read: ReadPart) -> tuple[tuple[int, int], Shapes]:
        name = "weight_packed" if self.form == PACKED else "weight"
        if len(found.get(name, ())) != 2:
            raise ValueError(f"{name} is missing, or no matrix")
        rows, words = found[name]
        width = words * 32 // self.bits if self.form == PACKED else words
        groups = self._groups(width)
        scales = found["weight_scale"]
        whole = not self.group and scales in ((), (1,), (1, 1))
        parts = {
            "weight_scale": scales if whole else (rows, groups),
            "weight_shape": (2,),
            "weight_g_idx": (width,),
        }
        if self.form == PACKED:
            parts["weight_zero_point"] = (-(-rows * self.bits // 32), groups)
        return (rows, width), parts

    def weight(self, parts: Mapping[str, Tensor]) -> QuantizedWeight | Tensor:
        if self.form == PACKED:
            return self._packed(parts)
        stored = parts["weight"]
        rows, width = stored.shape
        scales = parts["weight_scale"].to(torch.float32).reshape(-1, self._groups(width))
        scales = scales.expand(rows, -1)
        if stored.is_floating_point() != (self.form == FLOAT):
            raise ValueError(f"weight is {stored.dtype}, which {self.form} has not")
        if self.form == FLOAT:
            return stored.to(torch.float32) * _of_inputs(scales, width, self.group)
        zeros = parts.get("weight_zero_point")
        if zeros is not None:
            zeros = (zeros.to(torch.int16) + 128).reshape(-1, self._groups(width)).expand(rows, -1)
        return self._codes(stored.to(torch.int16) + 128, zeros, scales)

    def _codes(self, numbers: Tensor, zeros: Tensor | None, scales: Tensor) -> QuantizedWeight:
        if not self.group:
            width = numbers.shape[1]
            zeros = None if zeros is None else for_groups(zeros, width)
            scales = for_groups(scales, width)
        form = code_format("compressed-tensors", self.bits, self.group or ROW_GROUP)
        return centred(numbers, zeros, scales, form)

    def _groups(self, width: int) -> int:
        return -(-width // self.group) if self.group else 1

    def _is_in_order(self, of_input: Tensor) -> bool:
        """Whether groups follow each other; -1 for all stands for that, too."""
        return bool((of_input == -1).all()) or is_in_order(of_input, self.group)

    def _packed(self, parts: Mapping[str, Tensor]) -> QuantizedWeight | Tensor:
        numbers, scales = unpacked(parts["weight_packed"], self.bits), parts["weight_scale"]
        rows, width = numbers.shape
        shape = parts.get("weight_shape")
        if shape is not None and shape.tolist() != [rows, width]:
            raise ValueError(f"weight_shape is {shape.tolist()}, its codes are of {[rows, width]}")
        scales, zeros = scales.reshape(-1, self._groups(width)).expand(rows, -1), None
        if "weight_zero_point" in parts:
            zeros = unpacked(parts["weight_zero_point"].t(), self.bits).t()[:rows]
        of_input = parts.get("weight_g_idx")
        if of_input is not None and not self._is_in_order(of_input):
            if zeros is None:
                zeros = torch.full(scales.shape, 2 ** (self.bits - 1), dtype=torch.int16)
            return dequantized_in_order(numbers, zeros, scales, of_input)
        return self._codes(numbers, zeros, scales)


def _of_inputs(numbers: Tensor, width: int, group: int) -> Tensor:
    """(N, groups) -> what multiplies (N, width)."""
    return numbers.repeat_interleave(min(group, width), dim=1)[:, :width] if group else numbers


class CompressedTensors:
    method, name = "compressed-tensors", "compressed-tensors"
    required: tuple[str, ...] = ("weight_scale",)
    optional: tuple[str, ...] = (
        *("weight", "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx"),
        *("input_scale", "input_zero_point"),
    )
    types: Mapping[str, tuple[str, ...]] = MappingProxyType(
        {
            "weight": ("I8", *FLOATS8),
            "weight_packed": ("I32",),
            "weight_scale": FLOATS,
            "weight_zero_point": ("I32", "I8"),
            "weight_shape": ("I64", "I32"),
            "weight_g_idx": ("I32", "I64"),
        }
    )

    def read(self, settings: Settings) -> CompressedPacking:
        form = settings.text("format", PACKED)
        if form not in FORMATS:
            settings.refuse(f"format {form!r} is not supported; {', '.join(FORMATS)} are")
        groups = settings.get("config_groups")
        if not isinstance(groups, dict) or len(groups) != 1:
            settings.refuse("config_groups must be one group; models of several are not supported")
        (name,) = groups if isinstance(groups, dict) and len(groups) == 1 else ("group_0",)
        weights = settings.part("config_groups").part(name).part("weights")
        bits = weights.integer("num_bits", 4)
        if bits not in ((8,) if form != PACKED else (4, 8)):
            settings.refuse(f"num_bits of {bits} are not supported in {form}")
        strategy = weights.text("strategy", "group")
        if strategy not in STRATEGIES:
            settings.refuse(f"strategy {strategy!r} is not supported; {', '.join(STRATEGIES)} are")
        group = weights.integer("group_size", 128) if strategy == "group" else 0
        return CompressedPacking(form, bits if bits in (4, 8) else 8, group)


FORMAT = QuantizedSafetensors(CompressedTensors())
