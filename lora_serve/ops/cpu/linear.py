"""The native linear layers: weights as they are, quantised ones, and screens of the LM head."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from lora_serve.ops._cpu import Backend, PackedScreen
from lora_serve.ops.contract import ScreenedArgmax
from lora_serve.ops.cpu.recording import Recorder
from lora_serve.ops.cpu.weights import (
    Packed,
    PackedLinear,
    QuantizedLinear,
    dtype_code,
    pack_codes,
    pack_linear,
    pack_quantized,
    pack_screen,
)
from lora_serve.ops.quantization import CodeFormat, QuantizedWeight


class CpuLinears:
    """`LinearKernels` on one path, with `pack_quantized`, `pack_codes` and `pack_screen`."""

    def __init__(self, native: Backend, recorder: Recorder) -> None:
        self._native = native
        self._recorder = recorder

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Packed:
        return pack_linear(self._native, weight, bias)

    def pack_quantized(
        self,
        weight: Tensor,
        code_format: CodeFormat,
        bias: Tensor | None,
        quantize_activations: bool,
    ) -> Packed:
        return pack_quantized(self._native, weight, code_format, bias, quantize_activations)

    def pack_codes(self, weight: QuantizedWeight, bias: Tensor | None) -> Packed:
        return pack_codes(self._native, weight, bias)

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        if isinstance(packed, QuantizedLinear):
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

    def pack_screen(self, weight: Tensor, packed: Packed) -> ScreenedArgmax | None:
        assert isinstance(packed, PackedLinear), "a quantised weight has no screen"
        assert packed.bias is None, "a screen is of a weight alone"
        screen = pack_screen(self._native, weight)
        return None if screen is None else partial(self.screened_argmax, packed, screen)

    def screened_argmax(
        self,
        packed: PackedLinear,
        screen: PackedScreen,
        x: Tensor,
        bitmasks: Sequence[bytes | None],
    ) -> list[int]:
        assert len(bitmasks) in (0, len(x)), f"{len(bitmasks)} bitmasks of {len(x)} rows"
        x = x.contiguous()
        return self._native.greedy(
            packed.code, x.data_ptr(), packed.address, screen, len(x), bitmasks
        )
