"""The native mixtures of experts: choosing, their products, and their sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_serve.ops._cpu import Backend
from lora_serve.ops._cpu import PackedExperts as NativeExperts
from lora_serve.ops.contract import ChosenExperts
from lora_serve.ops.cpu.dtypes import DTYPE_CODES
from lora_serve.ops.cpu.linear import CpuLinears
from lora_serve.ops.cpu.recording import Recorder
from lora_serve.ops.cpu.weights import Packed, PackedLinear, QuantizedLinear


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """native points into the linear layers, which are kept for it.

    code: the dtype of weights as they are; None for quantised ones, which take any.
    """

    native: NativeExperts
    linears: Sequence[Packed]
    code: int | None
    quantize_activations: bool
    in_features: int
    out_features: int


def pack_experts(experts: Sequence[Packed]) -> PackedExperts:
    shapes = {(linear.in_features, linear.out_features) for linear in experts}
    assert len(shapes) == 1, f"experts of the shapes {sorted(shapes)}"
    plain = [(e.address, e.bias_address) for e in experts if isinstance(e, PackedLinear)]
    quantized = [(e.weight, e.bias_address) for e in experts if isinstance(e, QuantizedLinear)]
    assert len(experts) in (len(plain), len(quantized)), "experts are not packed alike"
    first = experts[0]
    return PackedExperts(
        NativeExperts(plain or quantized),
        tuple(experts),
        first.code if isinstance(first, PackedLinear) else None,
        isinstance(first, QuantizedLinear) and first.quantize_activations,
        *shapes.pop(),
    )


class CpuExperts:
    """`ExpertKernels` on one path."""

    def __init__(self, native: Backend, recorder: Recorder, linears: CpuLinears) -> None:
        self._native = native
        self._recorder = recorder
        self._linears = linears

    pack_experts = staticmethod(pack_experts)

    def pack_gate(self, weight: Tensor, bias: Tensor | None = None) -> Packed:
        return self._linears.pack_linear(weight, bias)

    def gate(self, x: Tensor, packed: Packed) -> Tensor:
        return self._linears.linear(x, packed)

    def choose(self, logits: Tensor, num_chosen: int, among_chosen: bool) -> ChosenExperts:
        logits = logits.contiguous()
        rows, num_experts = logits.shape
        assert 0 < num_chosen <= num_experts, f"{num_chosen} chosen of {num_experts} experts"
        chosen = ChosenExperts(
            self._recorder.new(rows, num_chosen, dtype=torch.int32),
            self._recorder.new(rows, num_chosen, dtype=torch.float32),
        )
        self._native.choose(
            DTYPE_CODES[logits.dtype],
            logits.data_ptr(),
            chosen.ids.data_ptr(),
            chosen.weights.data_ptr(),
            rows,
            num_experts,
            num_chosen,
            among_chosen,
        )
        return chosen

    def linear(self, x: Tensor, packed: PackedExperts, chosen: ChosenExperts) -> Tensor:
        x = x.contiguous()
        rows, in_features = x.shape
        pairs = chosen.ids.numel()
        assert in_features == packed.in_features, f"x has {in_features}, not {packed.in_features}"
        assert pairs % max(1, rows) == 0, f"{pairs} pairs of {rows} rows"
        code = DTYPE_CODES[x.dtype]
        assert packed.code in (None, code), f"experts not of {x.dtype}"
        y = self._recorder.new(pairs, packed.out_features, dtype=x.dtype)
        self._native.experts(
            code,
            x.data_ptr(),
            packed.native,
            chosen.ids.data_ptr(),
            y.data_ptr(),
            pairs,
            pairs // max(1, rows),
            in_features,
            packed.out_features,
            packed.quantize_activations,
        )
        return y

    def combine(self, x: Tensor, chosen: ChosenExperts) -> Tensor:
        x = x.contiguous()
        rows, pairs_per_row = chosen.ids.shape
        width = x.shape[1]
        assert len(x) == rows * pairs_per_row, f"{len(x)} pairs, {tuple(chosen.ids.shape)} chosen"
        y = self._recorder.new(rows, width, dtype=x.dtype)
        self._native.combine(
            DTYPE_CODES[x.dtype],
            x.data_ptr(),
            chosen.weights.data_ptr(),
            y.data_ptr(),
            rows,
            pairs_per_row,
            width,
        )
        return y

    def add_gated(self, x: Tensor, logits: Tensor, total: Tensor) -> Tensor:
        x, logits = x.contiguous(), logits.contiguous()
        assert total.is_contiguous(), "add_gated adds in place: total must be contiguous"
        assert x.shape == total.shape, f"{tuple(x.shape)} to {tuple(total.shape)}"
        assert logits.shape == (len(x), 1), f"gates {tuple(logits.shape)} of {len(x)} rows"
        assert x.dtype == logits.dtype == total.dtype, f"{x.dtype}, {logits.dtype}, {total.dtype}"
        self._native.add_gated(
            DTYPE_CODES[x.dtype], x.data_ptr(), logits.data_ptr(), total.data_ptr(), *x.shape
        )
        return total
