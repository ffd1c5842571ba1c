"""Linear layers of weights as they are and of codes, and mixtures of experts made of either."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lora_serve.ops.contract import ChosenExperts
from lora_serve.ops.quantization import CodeFormat, QuantizedWeight, quantize
from lora_serve.ops.triton.codes import PackedCodes, pack_codes
from lora_serve.ops.triton.experts import (
    PackedExperts,
    add_gated_launch,
    choose_launch,
    combine_launch,
    experts_launch,
    pack_experts,
)
from lora_serve.ops.triton.launch import Machine, Run
from lora_serve.ops.triton.linear import PackedLinear, linear_launch, pack_linear
from lora_serve.ops.triton.quantized_experts import (
    QuantizedExperts,
    pack_quantized_experts,
    quantized_experts_launches,
)
from lora_serve.ops.triton.quantized_linear import quantized_linear_launches

Packed = PackedLinear | PackedCodes


class TritonLinears:
    """`LinearKernels`, with `pack_quantized` and `pack_codes`.

    batch_invariant: weights as they are by a kernel of fixed order instead of cuBLAS. Codes always.
    """

    def __init__(
        self, device: torch.device, machine: Machine, run: Run, *, batch_invariant: bool
    ) -> None:
        self._device = device
        self._machine = machine
        self._run = run
        self._batch_invariant = batch_invariant

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Packed:
        return pack_linear(weight, bias, self._device)

    def pack_rows(self, weight: Tensor) -> Packed:
        return pack_linear(weight, None, self._device)

    def pack_quantized(
        self,
        weight: Tensor,
        code_format: CodeFormat,
        bias: Tensor | None,
        quantize_activations: bool,
    ) -> Packed:
        quantized = quantize(weight.detach().to(self._device), code_format)
        return pack_codes(quantized, bias, self._device, quantize_activations)

    def pack_codes(self, weight: QuantizedWeight, bias: Tensor | None) -> Packed:
        return pack_codes(weight, bias, self._device, quantize_activations=False)

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        if isinstance(packed, PackedCodes):
            y = x.new_empty((x.shape[0], packed.out_features))
            for launch in quantized_linear_launches(x.contiguous(), packed, y, self._machine):
                self._run(launch)
            return y
        if not self._batch_invariant:
            return torch.nn.functional.linear(x, packed.weight, packed.bias)
        x = x.contiguous()
        y = x.new_empty((x.shape[0], packed.weight.shape[0]))
        self._run(linear_launch(x, packed, y, self._machine))
        return y


class TritonExperts:
    """The kernels of mixtures of experts. linears: packs and multiplies what decides between."""

    def __init__(self, linears: TritonLinears, machine: Machine, run: Run) -> None:
        self._linears = linears
        self._machine = machine
        self._run = run

    def pack_experts(self, experts: Sequence[Packed]) -> PackedExperts | QuantizedExperts:
        plain = [each for each in experts if isinstance(each, PackedLinear)]
        codes = [each for each in experts if isinstance(each, PackedCodes)]
        assert len(experts) in (len(plain), len(codes)), "experts are not packed alike"
        return pack_experts(plain) if plain else pack_quantized_experts(codes)

    def pack_gate(self, weight: Tensor, bias: Tensor | None = None) -> Packed:
        return self._linears.pack_linear(weight, bias)

    def gate(self, x: Tensor, packed: Packed) -> Tensor:
        return self._linears.linear(x, packed)

    def choose(self, logits: Tensor, num_chosen: int, among_chosen: bool) -> ChosenExperts:
        shape = (len(logits), num_chosen)
        chosen = ChosenExperts(
            torch.empty(shape, dtype=torch.int32, device=logits.device),
            torch.empty(shape, dtype=torch.float32, device=logits.device),
        )
        self._run(choose_launch(logits.contiguous(), chosen, among_chosen, self._machine))
        return chosen

    def linear(
        self, x: Tensor, packed: PackedExperts | QuantizedExperts, chosen: ChosenExperts
    ) -> Tensor:
        x = x.contiguous()
        y = x.new_empty((chosen.ids.numel(), packed.out_features))
        if isinstance(packed, PackedExperts):
            self._run(experts_launch(x, packed, chosen, y, self._machine))
            return y
        for launch in quantized_experts_launches(x, packed, chosen, y, self._machine):
            self._run(launch)
        return y

    def combine(self, x: Tensor, chosen: ChosenExperts) -> Tensor:
        y = x.new_empty((len(chosen.ids), x.shape[1]))
        self._run(combine_launch(x.contiguous(), chosen, y, self._machine))
        return y

    def add_gated(self, x: Tensor, logits: Tensor, total: Tensor) -> Tensor:
        assert total.is_contiguous(), "add_gated adds in place: total must be contiguous"
        launch = add_gated_launch(x.contiguous(), logits.contiguous(), total, self._machine)
        self._run(launch)
        return total
