"""Directories of safetensors whose linear layers are codes: what GPTQ, AWQ and others have alike.

In such a checkpoint the weight of a layer is several tensors. Here they are one of the name that it
would have without, so that the rest of the engine sees a checkpoint like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from lora_serve.errors import ConfigError
from lora_serve.models.checkpoints.base import StoredTensor, StoredTensors, refuse_all
from lora_serve.models.checkpoints.config_json import quantization_method, read_config_json
from lora_serve.models.checkpoints.safetensors import FORMAT as SAFETENSORS
from lora_serve.models.settings import Settings
from lora_serve.ops.quantization import CodeFormat, QuantizedWeight

QUANTIZATION = "quantization_config"
FLOATS8 = ("F8_E4M3", "F8_E5M2")
KEPT_GROUPS = (16, 32, 64, 128, 256)
KV_SCALES = (".k_scale", ".v_scale", ".q_scale")  # of KV in 8 bits; here it is never rounded
ROW_GROUP = 128  # so many codes of a row share what is one scale of all
Shapes = Mapping[str, tuple[int, ...]]
Types = Mapping[str, str]  # as StoredTensor.dtype
ReadPart = Callable[[str], Tensor]


class Packing(Protocol):
    """How one checkpoint's weights are packed, as its settings say."""

    def shapes(self, found: Shapes, read: ReadPart, types: Types) -> tuple[tuple[int, int], Shapes]:
        """The weight's shape (out, in), and those that its tensors must have.

        found, types: of those that there are, by their part. read: gives a part of a few bytes
        whose values say it.

        Raises:
            ValueError: they cannot be those of one weight.
        """

    def weight(self, parts: Mapping[str, Tensor]) -> QuantizedWeight | Tensor:
        """The weight as codes, or dequantised in float32 where codes cannot say it."""


class Scheme(Protocol):
    """A way to quantise. method: the quant_method of a config. name: what people call it.

    required, optional: the parts of a weight, by what their names have behind the layer's. types:
    the dtypes that a part may have, where not any can be read.
    """

    method: str
    name: str
    required: tuple[str, ...]
    optional: tuple[str, ...]
    types: Mapping[str, tuple[str, ...]]

    def read(self, settings: Settings) -> Packing:
        """What `quantization_config` says; what cannot be read is refused in `settings`."""


@dataclass(frozen=True, slots=True)
class QuantizedSafetensors:
    """A `CheckpointFormat` of one scheme."""

    scheme: Scheme

    @property
    def name(self) -> str:
        return self.scheme.name

    @property
    def files(self) -> tuple[str, ...]:
        return SAFETENSORS.files

    @property
    def dtypes(self) -> tuple[str, ...]:
        return (*SAFETENSORS.dtypes, self.scheme.name)

    def recognises(self, directory: Path) -> bool:
        return quantization_method(directory) == self.scheme.method

    def config(self, directory: Path) -> Mapping[str, object]:
        config = read_config_json(directory)
        self._packing(directory, config)
        return {key: value for key, value in config.items() if key != QUANTIZATION}

    def open(self, directory: Path) -> OpenQuantized:
        packing = self._packing(directory, read_config_json(directory))
        return OpenQuantized(directory, SAFETENSORS.open(directory), self.scheme, packing)

    def _packing(self, directory: Path, config: Mapping[str, object]) -> Packing:
        settings = Settings(config).part(QUANTIZATION)
        packing = self.scheme.read(settings)
        if settings.findings:
            told = "; ".join(settings.findings)
            raise ConfigError(f"{directory / 'config.json'}: {QUANTIZATION}: {told}")
        return packing


class OpenQuantized:
    """The open files. Weights that lack a part, or whose parts do not fit each other, are refused.

    Raises:
        ConfigError: naming them.
    """

    def __init__(
        self, directory: Path, plain: StoredTensors, scheme: Scheme, packing: Packing
    ) -> None:
        self._directory = directory
        self._plain = plain
        self._scheme = scheme
        self._packing = packing
        stored = {
            name: each for name, each in plain.tensors().items() if not name.endswith(KV_SCALES)
        }
        self._parts = dict(_weights(stored, scheme))
        taken = {name for parts in self._parts.values() for name in parts.values()}
        self._tensors = {name: each for name, each in stored.items() if name not in taken}
        findings: list[str] = []
        for name, parts in self._parts.items():
            found = {part: stored[tensor] for part, tensor in parts.items()}
            try:
                shape = self._checked_shape(found, partial(self._read_part, parts))
            except ValueError as error:
                findings.append(f"{name}: {error}")
                continue
            ranges = tuple(each for tensor in found.values() for each in tensor.ranges)
            self._tensors[name] = StoredTensor(shape, scheme.name, True, ranges)
        refuse_all(directory, findings)

    def tensors(self) -> Mapping[str, StoredTensor]:
        return self._tensors

    def read(self, name: str, wanted: torch.dtype = torch.float32) -> Tensor:
        if name not in self._parts:
            return self._plain.read(name, wanted)
        weight = self._weight(name)
        return weight.dequantized() if isinstance(weight, QuantizedWeight) else weight

    def read_codes(self, name: str) -> QuantizedWeight | None:
        weight = self._weight(name) if name in self._parts else None
        if isinstance(weight, QuantizedWeight) and weight.format.group in KEPT_GROUPS:
            return weight
        return None

    def _read_part(self, names: Mapping[str, str], part: str) -> Tensor:
        return self._plain.read(names[part])

    def _weight(self, name: str) -> QuantizedWeight | Tensor:
        parts = {part: self._plain.read(tensor) for part, tensor in self._parts[name].items()}
        try:
            return self._packing.weight(parts)
        except ValueError as error:
            raise ConfigError(f"{self._directory}: {name}: {error}") from error

    def _checked_shape(self, found: Mapping[str, StoredTensor], read: ReadPart) -> tuple[int, int]:
        missing = [part for part in self._scheme.required if part not in found]
        if missing:
            raise ValueError(f"{', '.join(missing)} is missing")
        for part, each in found.items():
            if 0 in each.shape:
                raise ValueError(f"{part} of shape {each.shape} is empty")
            types = self._scheme.types.get(part, (each.dtype,))
            if each.dtype not in types:
                raise ValueError(f"{part} is stored as {each.dtype}, not {' or '.join(types)}")
        shapes = {part: each.shape for part, each in found.items()}
        dtypes = {part: each.dtype for part, each in found.items()}
        shape, expected = self._packing.shapes(shapes, read, dtypes)
        for part, stated in shapes.items():
            if part in expected and stated != expected[part]:
                raise ValueError(f"{part} has shape {stated}, not {expected[part]}")
        return shape


def _weights(
    stored: Mapping[str, StoredTensor], scheme: Scheme
) -> Iterator[tuple[str, dict[str, str]]]:
    """The name of each quantised weight, and its tensors' names by their part."""
    parts = (*scheme.required, *scheme.optional)
    layers: dict[str, dict[str, str]] = {}
    for name in stored:
        part = next((part for part in parts if name.endswith(f".{part}")), None)
        if part is not None:
            layers.setdefault(name.removesuffix(f".{part}"), {})[part] = name
    for layer, found in layers.items():
        if set(found) - {"weight"}:  # a weight without scales is one of floats
            yield f"{layer}.weight", found


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Whole numbers of 32 bits (..., N) -> the numbers in them (..., N * 32 / bits), lowest first.

    Result: int16, from 0 on.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers = words.to(torch.int32)[..., None] >> shifts & (2**bits - 1)
    return numbers.to(torch.int16).flatten(-2)


def centred(
    unsigned: Tensor, zeros: Tensor | None, scales: Tensor, form: CodeFormat
) -> QuantizedWeight:
    """The weight scale * (number - zero).

    Args:
        unsigned: (N, K), from 0 on.
        zeros: (N, groups); None: half of what `form`'s bits can hold.
        scales: (N, groups), any float type.
        form: of the codes.
    """
    half = 2 ** (form.bits - 1)
    scales = scales.to(torch.float32).contiguous()
    offsets = None
    if zeros is not None and bool((zeros != half).any()):
        offsets = scales * (half - zeros.to(torch.float32))
    return QuantizedWeight(form, (unsigned - half).to(torch.int8).contiguous(), scales, offsets)


def of_blocks(scales: Tensor, block: tuple[int, int], rows: int, width: int) -> Tensor:
    """(ceil(N / B), ceil(K / C)), of blocks (B, C), -> what multiplies (N, K)."""
    tall, wide = min(block[0], rows), min(block[1], width)
    spread = scales.repeat_interleave(tall, dim=0).repeat_interleave(wide, dim=1)
    return spread[:rows, :width]


def num_blocks(block: tuple[int, int], rows: int, width: int) -> tuple[int, int]:
    return -(-rows // block[0]), -(-width // block[1])


def read_block(value: object) -> tuple[int, int] | None:
    """The rows and inputs of a block as a config says them; None if it says something else."""
    if isinstance(value, list) and len(value) == 2:
        tall, wide = value
        # An exact type: true and false are whole numbers to isinstance.
        if type(tall) is int and type(wide) is int and tall > 0 and wide > 0:
            return tall, wide
    return None


def code_format(name: str, bits: int, group: int) -> CodeFormat:
    half = 2 ** (bits - 1)
    return CodeFormat(name, bits, group, least=-half, most=half - 1)


def is_in_order(of_input: Tensor, group: int) -> bool:
    """Whether groups follow each other. of_input: (K), of each input. group: 0: of a whole row."""
    natural = torch.arange(len(of_input)).to(of_input) // (group or len(of_input))
    return torch.equal(of_input, natural)


def dequantized_in_order(
    unsigned: Tensor, zeros: Tensor, scales: Tensor, of_input: Tensor
) -> Tensor:
    """The weight scale * (number - zero), float32, whose inputs have groups in any order.

    Args:
        unsigned: (N, K).
        zeros, scales: (N, groups).
        of_input: (K), the group of each input.

    Raises:
        ValueError: there is no such group.
    """
    groups = scales.shape[1]
    if int(of_input.min()) < 0 or int(of_input.max()) >= groups:
        raise ValueError(f"g_idx names groups beyond the {groups} that there are")
    at = of_input.long()
    return (unsigned - zeros[:, at]).to(torch.float32) * scales[:, at].to(torch.float32)


def for_groups(numbers: Tensor, width: int) -> Tensor:
    """(N, 1), of whole rows, -> (N, groups of ROW_GROUP)."""
    return numbers.expand(-1, -(-width // ROW_GROUP))
