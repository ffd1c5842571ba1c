"""AWQ: checkpoints of AutoAWQ, in its layout "gemm".

    weight[n][k] = scales[k // group][n] * (q[k][n] - zeros[k // group][n])

q and zeros are packed along n, eight to a word, in the order below.

Source: github.com/casper-hansen/AutoAWQ, awq/utils/packing_utils.py
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
    for_groups,
    unpacked,
)
from lora_serve.models.settings import Settings
from lora_serve.ops.quantization import QuantizedWeight

BITS = 4
# Output 8 i + j is the nibble ORDER[j] of word i.
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class AwqPacking:
    """group: 0 for one of a whole row."""

    group: int

    def shapes(self, found: Shapes, read: ReadPart, types: Types) -> tuple[tuple[int, int], Shapes]:
        if len(found["qweight"]) != 2:
            raise ValueError(f"qweight has shape {found['qweight']}, not that of a matrix")
        width, words = found["qweight"]
        groups = -(-width // (self.group or width))
        parts = {"scales": (groups, words * 8), "qzeros": (groups, words)}
        return (words * 8, width), parts

    def weight(self, parts: Mapping[str, Tensor]) -> QuantizedWeight | Tensor:
        numbers, zeros = _in_order(parts["qweight"]).t(), _in_order(parts["qzeros"]).t()
        scales, width = parts["scales"].t(), numbers.shape[1]
        if not self.group:
            zeros, scales = for_groups(zeros, width), for_groups(scales, width)
        return centred(numbers, zeros, scales, code_format("AWQ", BITS, self.group or ROW_GROUP))


def _in_order(words: Tensor) -> Tensor:
    """(R, N / 8) -> (R, N)."""
    return unpacked(words, BITS).unflatten(-1, (-1, 8))[..., list(ORDER)].flatten(-2)


class Awq:
    method, name = "awq", "AWQ"
    required: tuple[str, ...] = ("qweight", "qzeros", "scales")
    optional: tuple[str, ...] = ()
    types: Mapping[str, tuple[str, ...]] = MappingProxyType(
        {"qweight": ("I32",), "qzeros": ("I32",), "scales": FLOATS}
    )

    def read(self, settings: Settings) -> AwqPacking:
        bits = settings.integer("bits", BITS)
        if bits != BITS:
            settings.refuse(f"bits of {bits} are not supported; {BITS} are")
        version = settings.text("version", "gemm").lower()
        if version != "gemm":
            settings.refuse(f"version {version!r} is not supported; gemm is")
        group = settings.get("group_size")
        return AwqPacking(0 if group == -1 else settings.integer("group_size", 128))


FORMAT = QuantizedSafetensors(Awq())
