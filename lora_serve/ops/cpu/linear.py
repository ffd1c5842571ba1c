"""The native linear layers: weights as they are, quantised ones, and screens of the LM head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lora_serve.ops._cpu import Backend, PackedScreen
from lora_serve.ops.contract import TokenChoice
from lora_serve.ops.cpu.dtypes import dtype_code
from lora_serve.ops.cpu.packing import CpuPacking
from lora_serve.ops.cpu.recording import Recorder
from lora_serve.ops.cpu.weights import (
    Packed,
    PackedLinear,
    PackedRows,
    QuantizedLinear,
    pack_codes,
    pack_linear,
    pack_quantized,
    pack_rows,
)
from lora_serve.ops.quantization import CodeFormat, QuantizedWeight

# csrc/cpu/packing.h: two panels of 16 outputs lie side by side, in words.
OUTPUTS_SIDE_BY_SIDE = 32
WORD_BYTES = 4

# `Gate` of csrc/cpu/kernels.h.
GATES = {"silu": 0, "gelu_tanh": 1}


class CpuLinears:
    """`LinearKernels` on one path, with `fuse_gated` and what else packs weights."""

    def __init__(self, native: Backend, recorder: Recorder, packing: CpuPacking) -> None:
        self._native = native
        self._recorder = recorder
        self._packing = packing

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Packed:
        return pack_linear(self._packing, weight, bias)

    def pack_rows(self, weight: Tensor) -> Packed:
        return pack_rows(self._native.path, weight)

    def pack_quantized(
        self,
        weight: Tensor,
        code_format: CodeFormat,
        bias: Tensor | None,
        quantize_activations: bool,
    ) -> Packed:
        return pack_quantized(self._packing, weight, code_format, bias, quantize_activations)

    def pack_codes(self, weight: QuantizedWeight, bias: Tensor | None) -> Packed:
        return pack_codes(self._packing, weight, bias)

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        if not isinstance(packed, PackedLinear):
            if isinstance(packed, PackedRows):
                return torch.cat([self.linear(x, part) for part in packed.parts], dim=1)
            return self.quantized_linear(x, packed)
        x = x.contiguous()
        rows, in_features = x.shape
        out_features = packed.out_features
        assert in_features == packed.in_features, f"x has {in_features}, not {packed.in_features}"
        y = self._recorder.new(rows, out_features, dtype=x.dtype)
        self._native.linear(
            packed.code,
            x.data_ptr(),
            packed.address,
            packed.bias_address,
            y.data_ptr(),
            rows,
            in_features,
            out_features,
        )
        return y

    def fuse_gated(self, packed: Packed, activation: str) -> Callable[[Tensor], Tensor] | None:
        """None for codes, and where up's outputs begin beside the gate's last ones."""
        if not isinstance(packed, PackedLinear) or packed.out_features % (2 * OUTPUTS_SIDE_BY_SIDE):
            return None
        return partial(self._gated_linear, packed, GATES[activation])

    def _gated_linear(self, packed: PackedLinear, gate: int, x: Tensor) -> Tensor:
        x = x.contiguous()
        rows, in_features = x.shape
        assert in_features == packed.in_features, f"x has {in_features}, not {packed.in_features}"
        y = self._recorder.new(rows, packed.out_features // 2, dtype=x.dtype)
        self._native.gated_linear(
            packed.code,
            x.data_ptr(),
            packed.address,
            packed.bias_address,
            y.data_ptr(),
            rows,
            in_features,
            packed.out_features,
            gate,
        )
        return y

    def quantized_linear(self, x: Tensor, packed: QuantizedLinear) -> Tensor:
        x = x.contiguous()
        rows, in_features = x.shape
        assert in_features == packed.in_features, f"x has {in_features}, not {packed.in_features}"
        assert packed.bias is None or packed.bias.dtype == x.dtype, f"bias not of {x.dtype}"
        y = self._recorder.new(rows, packed.out_features, dtype=x.dtype)
        self._native.quantized_linear(
            dtype_code(x.dtype),
            x.data_ptr(),
            packed.weight,
            packed.bias_address,
            y.data_ptr(),
            rows,
            packed.quantize_activations,
        )
        return y

    def pack_screen(self, weight: Tensor, packed: Packed) -> CpuScreen | None:
        assert isinstance(packed, PackedLinear), "a quantised weight has no screen"
        assert packed.bias is None, "a screen is of a weight alone"
        screen = self._packing.screen(weight)
        return None if screen is None else CpuScreen(self._native, packed, screen)


@dataclass(frozen=True, slots=True)
class CpuScreen:
    """`Screen` of a packed weight."""

    native: Backend
    packed: PackedLinear
    screen: PackedScreen

    def __call__(self, x: Tensor, bitmasks: Sequence[bytes | None]) -> list[int]:
        return self._tokens(x, bitmasks, ())

    def draw(
        self, x: Tensor, bitmasks: Sequence[bytes | None], choices: Sequence[TokenChoice]
    ) -> list[int]:
        assert len(choices) == len(x), f"{len(choices)} choices of {len(x)} rows"
        return self._tokens(x, bitmasks, choices)

    def _tokens(
        self, x: Tensor, bitmasks: Sequence[bytes | None], choices: Sequence[TokenChoice]
    ) -> list[int]:
        assert len(bitmasks) in (0, len(x)), f"{len(bitmasks)} bitmasks of {len(x)} rows"
        x, packed = x.contiguous(), self.packed
        return self.native.screened_tokens(
            packed.code, x.data_ptr(), packed.address, self.screen, len(x), bitmasks, choices
        )

    def outputs(self, x: Tensor, tokens: Sequence[int]) -> list[float]:
        """Compute of each row the outputs that are packed beside the one asked for."""
        x, packed = x.contiguous(), self.packed
        y = torch.empty(len(x), OUTPUTS_SIDE_BY_SIDE, dtype=x.dtype)
        words = -(-packed.in_features * x.itemsize // WORD_BYTES)
        for row, token in enumerate(tokens):
            first = token // OUTPUTS_SIDE_BY_SIDE * OUTPUTS_SIDE_BY_SIDE
            self.native.linear(
                packed.code,
                x[row].data_ptr(),
                packed.address + first * words * WORD_BYTES,
                0,
                y[row].data_ptr(),
                1,
                packed.in_features,
                min(OUTPUTS_SIDE_BY_SIDE, packed.out_features - first),
            )
        places = torch.tensor(tokens) % OUTPUTS_SIDE_BY_SIDE
        return y.gather(1, places[:, None])[:, 0].tolist()
