"""bitsandbytes: checkpoints of 4 bits (NF4, FP4) or of 8, as transformers saves them.

    weight[i] = code[q[i]] * absmax[i // B]       4 bits; i counts the values of all rows
    weight[n][k] = q[n][k] * SCB[n] / 127         8 bits

The table `code` is stored, as quant_map. Of two values in a byte the first has the high half. The
absmax may be quantised itself ("double quantisation"), in blocks of C:

    absmax[j] = nested_code[p[j]] * nested_absmax[j // C] + nested_offset

Values of 4 bits are no multiples of a scale, so they are dequantised. Rows of 8 bits keep their
codes; outliers of activations, which bitsandbytes computes in 16 bits, need nothing here.

Source: github.com/bitsandbytes-foundation/bitsandbytes, bitsandbytes/functional.py (QuantState)
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from lora_serve.models.checkpoints.base import FLOATS
from lora_serve.models.checkpoints.quantized_safetensors import (
    ROW_GROUP,
    QuantizedSafetensors,
    ReadPart,
    Shapes,
    Types,
    code_format,
    for_groups,
)
from lora_serve.models.settings import Settings
from lora_serve.ops.quantization import QuantizedWeight

KINDS = ("nf4", "fp4")
ABSMAX, CODE = "weight.absmax", "weight.quant_map"
NESTED_ABSMAX, NESTED_CODE = "weight.nested_absmax", "weight.nested_quant_map"
STATES = tuple(f"weight.quant_state.bitsandbytes__{kind}" for kind in KINDS)
MOST_STATE_BYTES = 4096
MOST_BLOCK = 4096  # values, as bitsandbytes itself has it
ROW_MAJOR = 0  # of weight_format; others are layouts of some GPUs
VALUES_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class State:
    """What is said of one weight of 4 bits. nested_block: 0 where absmax are floats."""

    rows: int
    width: int
    block: int
    nested_block: int
    nested_offset: float

    @property
    def num_blocks(self) -> int:
        return -(-self.rows * self.width // self.block)

    def shapes(self) -> Shapes:
        nested = -(-self.num_blocks // self.nested_block) if self.nested_block else 0
        return {
            "weight": (-(-self.rows * self.width // 2), 1),
            ABSMAX: (self.num_blocks,),
            CODE: (16,),
            NESTED_ABSMAX: (nested,),
            NESTED_CODE: (256,),
        }


@dataclass(frozen=True, slots=True)
class FourBits:
    def shapes(self, found: Shapes, read: ReadPart, types: Types) -> tuple[tuple[int, int], Shapes]:
        states = [each for each in STATES if each in found]
        if len(states) != 1:
            raise ValueError(f"one of {', '.join(STATES)} is needed, there are {len(states)}")
        if math.prod(found[states[0]]) > MOST_STATE_BYTES:
            raise ValueError(f"{states[0]} has shape {found[states[0]]}, which no state has")
        state = read_state(read(states[0]))
        needed = (ABSMAX, CODE, *((NESTED_ABSMAX, NESTED_CODE) if state.nested_block else ()))
        missing = [part for part in needed if part not in found]
        if missing:
            raise ValueError(f"{', '.join(missing)} is missing")
        return (state.rows, state.width), state.shapes()

    def weight(self, parts: Mapping[str, Tensor]) -> QuantizedWeight | Tensor:
        state = read_state(next(parts[each] for each in STATES if each in parts))
        absmax, packed = _absmax(state, parts), parts["weight"].flatten()
        code, size = parts[CODE].to(torch.float32), state.rows * state.width
        values = torch.empty(2 * len(packed))
        for begin in range(0, len(packed), VALUES_AT_ONCE):
            some = packed[begin : begin + VALUES_AT_ONCE]
            halves = torch.stack((some >> 4, some & 15), dim=1).flatten()
            values[2 * begin : 2 * (begin + len(some))] = code[halves.long()]
        values = values[:size]
        whole = size // state.block * state.block
        values[:whole].view(-1, state.block).mul_(absmax[: whole // state.block, None])
        values[whole:] *= absmax[-1]
        return values.view(state.rows, state.width)


def _absmax(state: State, parts: Mapping[str, Tensor]) -> Tensor:
    """(num_blocks,), float32."""
    stored = parts[ABSMAX]
    if stored.is_floating_point() == bool(state.nested_block):
        said = "codes" if state.nested_block else "floats"
        raise ValueError(f"{ABSMAX} is stored as {stored.dtype}, its state says {said}")
    if not state.nested_block:
        return stored.to(torch.float32)
    each = parts[NESTED_ABSMAX].to(torch.float32).repeat_interleave(state.nested_block)
    nested = parts[NESTED_CODE].to(torch.float32)[stored.long()]
    return nested * each[: len(stored)] + state.nested_offset


def read_state(stored: Tensor) -> State:
    """What a quant_state says, which is JSON in bytes.

    Raises:
        ValueError: it cannot be read, or says what no weight has.
    """
    if stored.dtype != torch.uint8:
        raise ValueError(f"its quant_state is stored as {stored.dtype}, not as bytes")
    try:
        said = json.loads(bytes(stored.tolist()))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its quant_state is not JSON: {error}") from error
    if not isinstance(said, dict):
        raise ValueError("its quant_state is no JSON object")
    settings = Settings(said)
    block = settings.integer("blocksize", most=MOST_BLOCK)
    nested = settings.integer("nested_blocksize", most=MOST_BLOCK) if "nested_offset" in said else 0
    offset = said.get("nested_offset", 0.0)
    if not isinstance(offset, float | int) or not math.isfinite(offset):
        settings.refuse(f"nested_offset must be a number, is {str(offset)[:80]}")
    rows, width = _shape(settings)
    if settings.findings:
        raise ValueError(f"its quant_state: {'; '.join(settings.findings)}")
    return State(rows, width, block, nested, float(offset))


def _shape(settings: Settings) -> tuple[int, int]:
    shape = settings.get("shape")
    if isinstance(shape, list) and len(shape) == 2:
        rows, width = shape
        if type(rows) is int and type(width) is int and rows > 0 and width > 0:
            return rows, width
    settings.refuse(f"shape must be that of a matrix, is {str(shape)[:80]}")
    return 1, 1


@dataclass(frozen=True, slots=True)
class EightBits:
    def shapes(self, found: Shapes, read: ReadPart, types: Types) -> tuple[tuple[int, int], Shapes]:
        if len(found["weight"]) != 2:
            raise ValueError(f"weight has shape {found['weight']}, not that of a matrix")
        rows, width = found["weight"]
        if "SCB" not in found:
            raise ValueError("SCB is missing")
        return (rows, width), {"SCB": (rows,), "weight_format": ()}

    def weight(self, parts: Mapping[str, Tensor]) -> QuantizedWeight | Tensor:
        codes, layout = parts["weight"], parts.get("weight_format")
        if codes.dtype != torch.int8:
            raise ValueError(f"weight is stored as {codes.dtype}, not as torch.int8")
        if layout is not None and int(layout) != ROW_MAJOR:
            raise ValueError(f"weight_format {int(layout)} is a layout of some GPUs; save it anew")
        scales = for_groups(parts["SCB"].to(torch.float32)[:, None] / 127, codes.shape[1])
        return QuantizedWeight(code_format("bitsandbytes", 8, ROW_GROUP), codes, scales)


class BitsAndBytes:
    method, name = "bitsandbytes", "bitsandbytes"
    required: tuple[str, ...] = ("weight",)
    optional: tuple[str, ...] = (
        *(ABSMAX, CODE, NESTED_ABSMAX, NESTED_CODE, *STATES),
        *("SCB", "weight_format"),
    )
    types: Mapping[str, tuple[str, ...]] = MappingProxyType(
        {
            "weight": ("U8", "I8"),
            ABSMAX: ("U8", "F32"),
            **dict.fromkeys((CODE, NESTED_ABSMAX, NESTED_CODE, "SCB"), FLOATS),
            **dict.fromkeys((*STATES, "weight_format"), ("U8",)),
        }
    )

    def read(self, settings: Settings) -> FourBits | EightBits:
        is_4bit, is_8bit = (settings.flag(f"load_in_{bits}bit", False) for bits in (4, 8))
        if is_4bit == is_8bit:
            settings.refuse("one of load_in_4bit and load_in_8bit must be true")
        return FourBits() if is_4bit else EightBits()


FORMAT = QuantizedSafetensors(BitsAndBytes())
