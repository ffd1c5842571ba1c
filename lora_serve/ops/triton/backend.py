"""The Triton kernels as `Ops`: on a card, or interpreted on the CPU where tests ask.

Every kernel call goes through one `run`; a caller that hands in another one sees all launches
(benchmarks/gpu/triton_resources.py compiles them). Calls enqueue on the current stream and never
wait for the card; what they allocate depends on shapes and plans, never on data, so a forward can
be captured as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
from torch import Tensor

from lora_serve.errors import ConfigError
from lora_serve.ops.contract import LoRAPart, Ops, Runtime
from lora_serve.ops.triton.attention_launch import attention_launches
from lora_serve.ops.triton.attention_plan import (
    AttentionPlan,
    fill_attention_plan,
    new_attention_plan,
    plan_attention,
)
from lora_serve.ops.triton.expert_lora_plan import plan_pairs
from lora_serve.ops.triton.kv_cache import new_kv_cache, rotary_and_write_kv_launch
from lora_serve.ops.triton.launch import Launcher, Machine, Run, machine_of, run
from lora_serve.ops.triton.linears import TritonExperts, TritonLinears
from lora_serve.ops.triton.lora import lora_launches
from lora_serve.ops.triton.lora_plan import (
    LoRAPlan,
    PackedAdapter,
    Segments,
    fill_lora_plan,
    new_lora_plan,
    pack_adapter,
    plan_lora,
)
from lora_serve.ops.triton.rowwise import (
    CAP,
    GELU,
    SCALE,
    add_launch,
    change_launch,
    gate_launch,
    layer_norm_launch,
    norm_launch,
)

# Raised whenever any kernel's results may change in a bit.
NUMERICS_VERSION = 2
LEAST_CAPABILITY = 80  # whose tensor cores multiply bfloat16


class TritonKernels:
    """All groups of kernels on one device.

    batch_invariant: linear layers by a kernel of fixed order instead of cuBLAS.
    """

    def __init__(
        self, device: torch.device, machine: Machine, *, batch_invariant: bool, run: Run = run
    ) -> None:
        self._device = device
        self._machine = machine
        self._batch_invariant = batch_invariant
        self._run = run

    def ops(self) -> Ops:
        linears = TritonLinears(
            self._device, self._machine, self._run, batch_invariant=self._batch_invariant
        )
        return Ops.of_one_backend(
            name="triton",
            numerics=self._numerics(),
            device=self._device,
            rowwise=self,
            linears=linears,
            experts=TritonExperts(linears, self._machine, self._run),
            adapters=self,
            attention=self,
            pack_quantized=linears.pack_quantized,
            pack_codes=linears.pack_codes,
            plan_pairs=plan_pairs,
            graph_plans=self,
            runtime=Runtime("triton", Launcher(self._machine, self._run)),
        )

    fill_lora_plan = staticmethod(fill_lora_plan)
    fill_attention_plan = staticmethod(fill_attention_plan)

    def _numerics(self) -> str:
        where = f"sm{self._machine.capability}" if self._device.type == "cuda" else "interpreted"
        linear = "invariant" if self._batch_invariant else f"torch{torch.__version__}"
        return f"triton-{NUMERICS_VERSION}-{triton.__version__}-{where}-{linear}"

    def embed(self, weight: Tensor, input_ids: Tensor, scale: float | None) -> Tensor:
        rows = weight[input_ids]
        if scale is not None:
            self.scale(rows, scale)
        return rows

    def pack_adapter(self, linears: Sequence[Sequence[LoRAPart]]) -> PackedAdapter:
        return pack_adapter(linears, self._device)

    def plan_lora(self, segments: Segments, num_tokens: int) -> LoRAPlan:
        return plan_lora(segments, num_tokens, self._device)

    def new_lora_plan(self, num_rows: int) -> LoRAPlan:
        return new_lora_plan(num_rows, self._device)

    def lora(self, y: Tensor, x: Tensor, plan: LoRAPlan, linear_index: int) -> None:
        assert y.is_contiguous(), "lora adds in place: y must be contiguous"
        for launch in lora_launches(y, x.contiguous(), plan, linear_index, self._machine):
            self._run(launch)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        self._run(norm_launch(x, None, weight, y, eps, self._machine))
        return y

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert residual.is_contiguous(), "add_rms_norm adds in place: residual must be contiguous"
        x = x.contiguous()
        y = torch.empty_like(x)
        self._run(norm_launch(x, residual, weight, y, eps, self._machine))
        return y

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        self._run(layer_norm_launch(x, weight, bias, y, eps, self._machine))
        return y

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        assert residual.is_contiguous(), "add works in place: residual must be contiguous"
        self._run(add_launch(x.contiguous(), residual, self._machine))
        return residual

    def scale(self, x: Tensor, factor: float) -> Tensor:
        assert x.is_contiguous(), "scale works in place: x must be contiguous"
        self._run(change_launch(x, SCALE, factor, self._machine))
        return x

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return self._gate(x, is_gelu=False)

    def gelu_tanh_and_mul(self, x: Tensor) -> Tensor:
        return self._gate(x, is_gelu=True)

    def _gate(self, x: Tensor, *, is_gelu: bool) -> Tensor:
        x = x.contiguous()
        y = x.new_empty((x.shape[0], x.shape[1] // 2))
        self._run(gate_launch(x, y, self._machine, is_gelu=is_gelu))
        return y

    def gelu_tanh(self, x: Tensor) -> Tensor:
        assert x.is_contiguous(), "gelu_tanh works in place: x must be contiguous"
        self._run(change_launch(x, GELU, 1.0, self._machine))
        return x

    def soft_cap(self, logits: Tensor, cap: float) -> Tensor:
        assert logits.is_contiguous(), "soft_cap works in place: logits must be contiguous"
        assert cap > 0, f"logits capped at {cap}"
        self._run(change_launch(logits, CAP, cap, self._machine))
        return logits

    def new_kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
    ) -> Tensor:
        return new_kv_cache(num_blocks, block_size, num_kv_heads, head_size, dtype, self._device)

    def rotary_and_write_kv(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos_sin: Tensor,
        positions: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
    ) -> None:
        launch = rotary_and_write_kv_launch(
            q, k, v, cos_sin, positions, kv_cache, slot_mapping, self._machine
        )
        self._run(launch)

    def plan_attention(
        self, query_start_loc: Tensor, seq_lens: Tensor, block_tables: Tensor, block_size: int
    ) -> AttentionPlan:
        return plan_attention(query_start_loc, seq_lens, block_tables, self._device)

    def new_attention_plan(
        self, num_rows: int, max_blocks: int, block_size: int, is_decode: bool
    ) -> AttentionPlan:
        return new_attention_plan(num_rows, max_blocks, block_size, is_decode, self._device)

    def paged_attention(
        self,
        q: Tensor,
        kv_cache: Tensor,
        plan: AttentionPlan,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        assert softcap is None or softcap > 0, f"scores capped at {softcap}"
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        launches = attention_launches(
            q, out, kv_cache, plan, scale, sliding_window, softcap, sinks, self._machine
        )
        for launch in launches:
            self._run(launch)
        return out


def load(device: torch.device, *, batch_invariant: bool, overlap_launches: bool = True) -> Ops:
    """The kernels for a card; or for the CPU, where TRITON_INTERPRET=1 has them interpreted.

    overlap_launches: if the card can, let a kernel begin while the one before it ends.

    Raises:
        ConfigError: for a card that they cannot run on.
    """
    machine = machine_of(device)
    if machine.capability < LEAST_CAPABILITY:
        found, least = machine.capability / 10, LEAST_CAPABILITY / 10
        raise ConfigError(
            f"--device {device}: this card has compute capability {found}, and the kernels need "
            f"{least} (A100, H100 or newer); use --device cpu"
        )
    if device.type == "cuda":
        # Else cuBLAS may add the parts of a sum in the model's dtype. torch has these two for the
        # whole process alone: they hold for every engine and for any other use of torch in it.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    machine = replace(machine, overlaps_launches=machine.overlaps_launches and overlap_launches)
    return TritonKernels(device, machine, batch_invariant=batch_invariant).ops()
