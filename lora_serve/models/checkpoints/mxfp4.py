"""MXFP4: gpt-oss's checkpoints, whose experts are numbers of 4 bits with a power of 2 for each 32.

    weight[e][32 g + i][n] = VALUES[nibble i of blocks[e][n][g]] * 2^(scales[e][n][g] - 127)

Of two values in a byte the first has the low half. A layer's experts lie in one tensor. Twice a
value is a whole number from -12 to 12: as codes they have 8 bits, with half the scale. Dequantised
they are bfloat16, which holds every such number exactly.

Source: opencompute.org, OCP Microscaling Formats (MX) Specification 1.0, section 5.3
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lora_serve.models.checkpoints.base import StoredTensor, StoredTensors, refuse_all
from lora_serve.models.checkpoints.config_json import quantization_method, read_config_json
from lora_serve.models.checkpoints.quantized_safetensors import QUANTIZATION
from lora_serve.models.checkpoints.safetensors import FORMAT as SAFETENSORS
from lora_serve.ops.quantization import CodeFormat, QuantizedWeight

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK_BYTES = 16
BIAS = 127
LEAST_SCALE = 2  # half of a lower one is no normal number in float32, and kernels may take it for 0
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*_MAGNITUDES, *(-each for each in _MAGNITUDES))
CODES = CodeFormat("MXFP4", bits=8, group=2 * BLOCK_BYTES, least=-12, most=12)


class Mxfp4:
    name = "MXFP4"
    files = SAFETENSORS.files
    dtypes = (*SAFETENSORS.dtypes, name)

    def recognises(self, directory: Path) -> bool:
        return quantization_method(directory) == "mxfp4"

    def config(self, directory: Path) -> Mapping[str, object]:
        config = read_config_json(directory)
        return {key: value for key, value in config.items() if key != QUANTIZATION}

    def open(self, directory: Path) -> OpenMxfp4:
        return OpenMxfp4(directory, SAFETENSORS.open(directory))


class OpenMxfp4:
    """The open files. Blocks and scales that do not fit each other are refused.

    Raises:
        ConfigError: naming them.
    """

    def __init__(self, directory: Path, plain: StoredTensors) -> None:
        self._plain = plain
        self._tensors = dict(plain.tensors())
        self._packed: set[str] = set()
        findings: list[str] = []
        for stored in [name for name in self._tensors if name.endswith((BLOCKS, SCALES))]:
            name = stored.removesuffix(BLOCKS).removesuffix(SCALES)
            if name in self._packed:
                continue
            self._packed.add(name)
            pair = [self._tensors.pop(f"{name}{part}", None) for part in (BLOCKS, SCALES)]
            try:
                self._tensors[name] = _of_pair(*pair)
            except ValueError as error:
                findings.append(f"{name}: {error}")
        refuse_all(directory, findings)

    def tensors(self) -> Mapping[str, StoredTensor]:
        return self._tensors

    def read(self, name: str, wanted: torch.dtype = torch.float32) -> Tensor:
        if name not in self._packed:
            return self._plain.read(name, wanted)
        blocks, scales = (self._plain.read(f"{name}{part}") for part in (BLOCKS, SCALES))
        weights = torch.empty(self._tensors[name].shape, dtype=torch.bfloat16)
        for expert, of_expert in enumerate(weights):
            of_expert.copy_(dequantized(blocks[expert], scales[expert]).t())
        return weights

    def read_codes(self, name: str) -> QuantizedWeight | None:
        """The rows of all experts, one below the other: (experts * out, in)."""
        if name not in self._packed:
            return self._plain.read_codes(name)
        blocks, scales = (self._plain.read(f"{name}{part}") for part in (BLOCKS, SCALES))
        if int(scales.min()) < LEAST_SCALE:
            return None
        codes = torch.tensor([round(2 * value) for value in VALUES], dtype=torch.int8)
        halves = _powers(scales.flatten(0, 1), BIAS + 1).to(torch.float32)
        return QuantizedWeight(CODES, codes[_nibbles(blocks).flatten(0, 1)], halves)


def _of_pair(blocks: StoredTensor | None, scales: StoredTensor | None) -> StoredTensor:
    """What both together store: (experts, in, out), as gpt-oss's weights lie.

    Raises:
        ValueError: they do not fit each other, or one is missing.
    """
    if blocks is None or scales is None:
        raise ValueError(f"its {BLOCKS if blocks is None else SCALES} are missing")
    for part, each in ((BLOCKS, blocks), (SCALES, scales)):
        if each.dtype != "U8":
            raise ValueError(f"its {part} are stored as {each.dtype}, not as U8")
    if len(blocks.shape) != 4 or 0 in blocks.shape or blocks.shape[3] != BLOCK_BYTES:
        raise ValueError(f"its {BLOCKS} have shape {blocks.shape}, not (experts, out, groups, 16)")
    if scales.shape != blocks.shape[:3]:
        raise ValueError(f"its {SCALES} have shape {scales.shape}, not {blocks.shape[:3]}")
    experts, rows, groups, _ = blocks.shape
    return replace(
        blocks,
        shape=(experts, groups * 2 * BLOCK_BYTES, rows),
        dtype=Mxfp4.name,
        is_readable=True,
        ranges=(*blocks.ranges, *scales.ranges),
    )


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """(N, G, 16) and (N, G), bytes, -> (N, 32 G), bfloat16. A scale of 255 stands for NaN."""
    values = torch.tensor(VALUES, dtype=torch.float32)[_nibbles(blocks)].unflatten(1, (-1, 32))
    return (values * _powers(scales, BIAS)[..., None]).flatten(1).to(torch.bfloat16)


def _nibbles(blocks: Tensor) -> Tensor:
    """(..., G, 16), bytes -> (..., 32 G), int32: which of VALUES stands there."""
    return torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-3).int()


def _powers(scales: Tensor, bias: int) -> Tensor:
    return torch.where(scales == 255, torch.nan, 2.0 ** (scales.double() - bias))


FORMAT = Mxfp4()
