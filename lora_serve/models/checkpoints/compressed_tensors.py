"""compressed-tensors: checkpoints of llm-compressor, whose weights are whole numbers or FP8.

    weight[n][k] = weight_scale[n][g] * (q[n][k] - weight_zero_point[n][g])

g is k // group, or 0 for a scale of a whole row or tensor; FP8 may have scales of blocks, as in
fp8.py. Numbers of "pack-quantized" are packed along k, each larger by half of what its bits hold;
their zero points are packed along n. A number of 4 bits in "int-quantized" has a byte of its own.
Where layers have settings of their own, a weight has those that its tensors fit; of 4 and 8 bits
in bytes, which look alike, it has 8, which say the same numbers. Rounding of activations and KV
that a checkpoint asks for is left out: they stay in full precision.

Source: github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
    Types,
    centred,
    code_format,
    dequantized_in_order,
    for_groups,
    is_in_order,
    num_blocks,
    of_blocks,
    read_block,
    unpacked,
)
from lora_serve.models.settings import Settings
from lora_serve.ops.quantization import QuantizedWeight

PACKED, INTEGERS, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
FORMATS = (PACKED, INTEGERS, FLOAT)
MIXED = "mixed-precision"  # each group of settings says its own
GROUP, BLOCK = "group", "block"
STRATEGIES = (GROUP, "channel", "tensor")
FOR_ALL = ((), (1,), (1, 1))  # shapes of one number for a whole tensor
BITS = {PACKED: (4, 8), INTEGERS: (4, 8), FLOAT: (8,)}


@dataclass(frozen=True, slots=True)
class CompressedPacking:
    """form: one of FORMATS. group: 0 for scales of whole rows or tensors. block: of FLOAT alone."""

    form: str
    bits: int
    group: int
    block: tuple[int, int] | None = None

    def shapes(self, found: Shapes, read: ReadPart, types: Types) -> tuple[tuple[int, int], Shapes]:
        name = "weight_packed" if self.form == PACKED else "weight"
        if len(found.get(name, ())) != 2:
            raise ValueError(f"{name} is missing, or no matrix")
        rows, words = found[name]
        width = words * 32 // self.bits if self.form == PACKED else words
        groups = self._groups(width)
        scales = found["weight_scale"]
        whole = not self.group and scales in FOR_ALL
        expected = num_blocks(self.block, rows, width) if self.block else (rows, groups)
        parts = {
            "weight_scale": scales if whole and not self.block else expected,
            "weight_shape": (2,),
            "weight_g_idx": (width,),
        }
        if self.form == PACKED:
            parts["weight_zero_point"] = (-(-rows * self.bits // 32), groups)
        elif self.form == INTEGERS and not (whole and found.get("weight_zero_point") in FOR_ALL):
            parts["weight_zero_point"] = (rows, groups)
        return (rows, width), parts

    def weight(self, parts: Mapping[str, Tensor]) -> QuantizedWeight | Tensor:
        if self.form == PACKED:
            return self._packed(parts)
        stored = parts["weight"]
        rows, width = stored.shape
        if stored.is_floating_point() != (self.form == FLOAT):
            raise ValueError(f"weight is {stored.dtype}, which {self.form} has not")
        zeros = parts.get("weight_zero_point")
        if self.form == FLOAT and zeros is not None and bool(zeros.to(torch.float32).any()):
            raise ValueError(f"weight_zero_point is not 0, which is not supported in {FLOAT}")
        scales = parts["weight_scale"].to(torch.float32)
        if self.block is not None:
            return stored.to(torch.float32) * of_blocks(scales, self.block, rows, width)
        scales = scales.reshape(-1, self._groups(width)).expand(rows, -1)
        if self.form == FLOAT:
            return stored.to(torch.float32) * _of_inputs(scales, width, self.group)
        half = 2 ** (self.bits - 1)
        if zeros is not None:
            zeros = (zeros.to(torch.int16) + half).reshape(-1, self._groups(width)).expand(rows, -1)
        numbers = stored.to(torch.int16) + half
        if int(numbers.min()) < 0 or int(numbers.max()) >= 2 * half:
            raise ValueError(f"weight has numbers of more than {self.bits} bits")
        return self._codes(numbers, zeros, scales)

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


@dataclass(frozen=True, slots=True)
class ManyPackings:
    """Several, of which a weight has the first that its tensors fit, or one alike of more bits."""

    packings: tuple[CompressedPacking, ...]

    def shapes(self, found: Shapes, read: ReadPart, types: Types) -> tuple[tuple[int, int], Shapes]:
        return self._fitting(found, read, types).shapes(found, read, types)

    def weight(self, parts: Mapping[str, Tensor]) -> QuantizedWeight | Tensor:
        found = {part: tuple(each.shape) for part, each in parts.items()}
        is_float = "weight" in parts and parts["weight"].is_floating_point()
        types = {"weight": FLOATS8[0] if is_float else "I8"}
        return self._fitting(found, parts.__getitem__, types).weight(parts)

    def _fitting(self, found: Shapes, read: ReadPart, types: Types) -> CompressedPacking:
        fitting = [each for each in self.packings if _fits(each, found, read, types)]
        if not fitting:
            raise ValueError("its tensors fit none of config_groups")
        first = fitting[0]
        if first.form != INTEGERS:
            return first
        alike = (each for each in fitting if replace(each, bits=first.bits) == first)
        return max(alike, key=lambda each: each.bits)


def _fits(packing: CompressedPacking, found: Shapes, read: ReadPart, types: Types) -> bool:
    try:
        shape, expected = packing.shapes(found, read, types)
    except ValueError:
        return False
    if packing.form == PACKED:
        stated = read("weight_shape").tolist() if "weight_shape" in found else [*shape]
        is_kind = stated == [*shape]
    else:
        is_kind = (types["weight"] in FLOATS8) == (packing.form == FLOAT)
    return is_kind and all(expected.get(part, each) == each for part, each in found.items())


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

    def read(self, settings: Settings) -> CompressedPacking | ManyPackings:
        groups = settings.part("config_groups")
        named, form = settings.get("config_groups"), settings.text("format", PACKED)
        if settings.part("transform_config").get("config_groups"):
            transforms = settings.part("transform_config").part("config_groups").objects()
            settings.refuse(
                "transform_config is not supported: weights are stored transformed, by "
                f"{', '.join(transforms)}; take a checkpoint that was quantised without transforms"
            )
        if not named:
            settings.refuse("config_groups is missing or empty")
        names = named if isinstance(named, dict) else {}
        packings = tuple(_packing(groups.part(name), form) for name in names)
        return packings[0] if len(packings) == 1 else ManyPackings(packings)


def _packing(group: Settings, form: str) -> CompressedPacking:
    """form: of all groups, where one does not say its own."""
    form = group.text("format", form) if form == MIXED else form
    if form not in FORMATS:
        group.refuse(f"format {form!r} is not supported; {', '.join(FORMATS)} are")
    weights = group.part("weights")
    bits = weights.integer("num_bits", 4)
    if form in FORMATS and bits not in BITS[form]:
        group.refuse(f"num_bits of {bits} are not supported in {form}")
    strategy, block = weights.text("strategy", GROUP), None
    if strategy == BLOCK and form == FLOAT:
        said = weights.get("block_structure")
        block = read_block(said)
        if block is None:
            group.refuse(f"block_structure must be two whole numbers, is {str(said)[:80]}")
    elif strategy not in STRATEGIES:
        group.refuse(
            f"strategy {strategy!r} is not supported in {form}; {', '.join(STRATEGIES)} are"
        )
    size = weights.integer("group_size", 128) if strategy == GROUP else 0
    return CompressedPacking(form, bits if bits in (4, 8) else 8, size, block)


FORMAT = QuantizedSafetensors(CompressedTensors())
