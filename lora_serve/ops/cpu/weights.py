"""Weights and adapters in the order of the native CPU kernels, copied from torch's once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_serve.ops._cpu import Backend, LoraAdapter, PackedQuantized, PackedWeight
from lora_serve.ops.contract import LoRAPart
from lora_serve.ops.cpu.dtypes import dtype_code
from lora_serve.ops.cpu.packing import CpuPacking
from lora_serve.ops.quantization import CodeFormat, QuantizedWeight

_PART_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """weight holds the native copy; address and bias_address are what a call passes on."""

    weight: PackedWeight
    bias: Tensor | None
    code: int
    address: int
    bias_address: int
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """weight holds codes and scales; the bias is in the dtype of activations."""

    weight: PackedQuantized
    bias: Tensor | None
    bias_address: int
    quantize_activations: bool
    in_features: int
    out_features: int


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Rows that came while steps were running. parts: their outputs lie side by side."""

    parts: tuple[PackedLinear, ...]

    @property
    def in_features(self) -> int:
        return self.parts[0].in_features

    @property
    def out_features(self) -> int:
        return sum(part.out_features for part in self.parts)


Packed = PackedLinear | QuantizedLinear | PackedRows


def pack_linear(packing: CpuPacking, weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """Copies the weight into the kernels' order; the source is not kept."""
    weight = weight.detach().contiguous()
    out_features, in_features = weight.shape
    if bias is not None:
        bias = bias.detach().to(weight.dtype).contiguous()
        assert bias.shape == (out_features,), f"bias {tuple(bias.shape)}, out {out_features}"
    code = dtype_code(weight.dtype)
    packed = packing.weight(weight)
    bias_address = 0 if bias is None else bias.data_ptr()
    return PackedLinear(packed, bias, code, packed.address, bias_address, in_features, out_features)


def pack_rows(path: str, weight: Tensor) -> PackedRows:
    """Copies the weight into the kernels' order, in any thread; the source is not kept.

    In memory of its own, which is given back with it, and without the threads of the steps; and in
    parts, because the interpreter's lock is held while one is packed: for about a millisecond.
    """
    packing = CpuPacking(Backend(path, 1))
    num_rows = max(1, _PART_BYTES // (weight.shape[1] * weight.itemsize))
    return PackedRows(tuple(pack_linear(packing, part, None) for part in weight.split(num_rows)))


def pack_quantized(
    packing: CpuPacking,
    weight: Tensor,
    code_format: CodeFormat,
    bias: Tensor | None,
    quantize_activations: bool,
) -> QuantizedLinear:
    """Finds codes and scales in the kernels' order; the weight is not kept."""
    packed = packing.quantized(weight.detach().contiguous(), code_format)
    return _quantized_linear(packed, weight.shape, bias, quantize_activations)


def pack_codes(
    packing: CpuPacking, weight: QuantizedWeight, bias: Tensor | None
) -> QuantizedLinear:
    """Copies codes, scales and offsets into the kernels' order; the source is not kept."""
    codes, scales = weight.codes.contiguous(), weight.scales.to(torch.float32).contiguous()
    offsets = None if weight.offsets is None else weight.offsets.to(torch.float32).contiguous()
    out_features, in_features = codes.shape
    groups = (out_features, -(-in_features // weight.format.group))
    assert codes.dtype == torch.int8
    assert scales.shape == groups, f"scales {tuple(scales.shape)}, not {groups}"
    assert offsets is None or offsets.shape == groups, "offsets are not as many as scales"
    packed = packing.codes(QuantizedWeight(weight.format, codes, scales, offsets))
    return _quantized_linear(packed, codes.shape, bias, quantize_activations=False)


def _quantized_linear(
    packed: PackedQuantized, shape: torch.Size, bias: Tensor | None, quantize_activations: bool
) -> QuantizedLinear:
    bias = None if bias is None else bias.detach().contiguous()
    bias_address = 0 if bias is None else bias.data_ptr()
    out_features, in_features = shape
    return QuantizedLinear(
        packed, bias, bias_address, quantize_activations, in_features, out_features
    )


def pack_adapter(linears: Sequence[Sequence[LoRAPart]]) -> LoraAdapter:
    """Copies all parts into the kernels' order; the sources are not kept."""
    parts = [part for linear in linears for part in linear]
    dtype = parts[0].a.dtype if parts else torch.float32
    kept: list[Tensor] = []  # what contiguous() made, alive until it is copied

    def address(tensor: Tensor) -> int:
        assert tensor.dtype == dtype, f"{tensor.dtype} in an adapter of {dtype}"
        kept.append(tensor.detach().contiguous())
        return kept[-1].data_ptr()

    return LoraAdapter(
        dtype_code(dtype),
        [
            [
                (
                    address(part.a),
                    address(part.b),
                    part.a.shape[0],
                    part.a.shape[1],
                    part.b.shape[0],
                    part.out_start,
                    part.scale,
                )
                for part in linear
            ]
            for linear in linears
        ],
    )
