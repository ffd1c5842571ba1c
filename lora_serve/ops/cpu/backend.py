"""The native CPU kernels (csrc/cpu) as `Ops`.

The one rule: whatever the native side takes on trust (addresses, shapes, dtypes, strides) is
checked or arranged here, dearly where weights and plans are made, cheaply in calls. Knows nothing
of how the kernels work; a number is summed in the same order on any number of threads.
"""

from __future__ import annotations

import os
from functools import partial

import torch
from torch import Tensor

from lora_serve.errors import ConfigError
from lora_serve.ops._cpu import Backend, PackedScreen, usable_paths, use_huge_pages
from lora_serve.ops.contract import Ops, Runtime, ScreenedArgmax
from lora_serve.ops.cpu import plans
from lora_serve.ops.cpu.plans import AttentionStep, LoraStep
from lora_serve.ops.cpu.recording import Recorder
from lora_serve.ops.cpu.threads import pin_threads
from lora_serve.ops.cpu.weights import (
    DTYPE_CODES,
    Packed,
    PackedLinear,
    QuantizedLinear,
    dtype_code,
    pack_adapter,
    pack_linear,
    pack_quantized,
    pack_screen,
)
from lora_serve.ops.quantization import CodeFormat

PATH_VARIABLE = "LORA_SERVE_CPU_PATH"

# Raised whenever any path's results may change in a bit.
NUMERICS_VERSION = 3

# Those that multiply bytes faster than memory brings them.
SCREENING_PATHS = ("avx512bf16", "avx512vnni")

GROUP = 16  # tokens that lie side by side in the KV cache, see csrc/cpu/kv_layout.h
MAX_HEAD_SIZE = 256


class CpuKernels:
    """All groups of kernels on one path.

    One thread calls at a time; but any may pack an adapter meanwhile.
    """

    def __init__(self, path: str, num_threads: int) -> None:
        self.native = Backend(path, num_threads)
        self._recorder = Recorder(self.native)

    def ops(self) -> Ops:
        return Ops.of_one_backend(
            name="cpu",
            numerics=f"cpu-{self.native.path}-{NUMERICS_VERSION}",
            device=torch.device("cpu"),
            rowwise=self,
            linears=self,
            pack_quantized=self.pack_quantized,
            pack_screen=self.pack_screen if self.native.path in SCREENING_PATHS else None,
            adapters=self,
            attention=self,
            graph_plans=plans,
            record=self._recorder.record,
            runtime=Runtime("cpu", self.native),
        )

    pack_adapter = staticmethod(pack_adapter)
    plan_lora = staticmethod(plans.plan_lora)
    plan_attention = staticmethod(plans.plan_attention)

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Packed:
        return pack_linear(self.native, weight, bias)

    def pack_quantized(
        self,
        weight: Tensor,
        code_format: CodeFormat,
        bias: Tensor | None,
        quantize_activations: bool,
    ) -> Packed:
        return pack_quantized(self.native, weight, code_format, bias, quantize_activations)

    def embed(self, weight: Tensor, input_ids: Tensor, scale: float | None) -> Tensor:
        vocab_size, hidden_size = weight.shape
        assert weight.is_contiguous(), "embed reads rows by address"
        input_ids = input_ids.contiguous()
        y = self._recorder.new(len(input_ids), hidden_size, dtype=weight.dtype)
        self.native.embed(
            weight.data_ptr(),
            input_ids.data_ptr(),
            y.data_ptr(),
            len(input_ids),
            hidden_size * weight.itemsize,
            vocab_size,
        )
        if scale is not None:
            self.native.scale(dtype_code(y.dtype), y.data_ptr(), y.numel(), scale)
        return y

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        if isinstance(packed, QuantizedLinear):
            return self.quantized_linear(x, packed)
        x = x.contiguous()
        rows, in_features = x.shape
        out_features = packed.out_features
        assert in_features == packed.in_features, f"x has {in_features}, not {packed.in_features}"
        y = self._recorder.new(rows, out_features, dtype=x.dtype)
        self.native.linear(
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
        self.native.quantized_linear(
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
        screen = pack_screen(self.native, weight)
        return None if screen is None else partial(self.screened_argmax, packed, screen)

    def screened_argmax(self, packed: PackedLinear, screen: PackedScreen, x: Tensor) -> list[int]:
        x = x.contiguous()
        return self.native.greedy(packed.code, x.data_ptr(), packed.address, screen, len(x))

    def lora(self, y: Tensor, x: Tensor, plan: LoraStep, linear_index: int) -> None:
        if plan.native is None:
            return
        x = x.contiguous()
        assert y.is_contiguous(), "lora adds in place: y must be contiguous"
        self.native.lora(
            DTYPE_CODES[x.dtype],
            x.data_ptr(),
            y.data_ptr(),
            plan.native,
            linear_index,
            x.shape[1],
            y.shape[1],
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        tokens, heads, width = x.shape if x.dim() == 3 else (len(x), 1, x.shape[1])
        y = self._recorder.new(*x.shape, dtype=x.dtype)
        code, weight_code = _norm_codes(x, weight)
        self.native.norm(
            code,
            x.data_ptr(),
            _token_stride(x.view(tokens, heads, width), width),
            heads,
            0,
            weight_code,
            weight.data_ptr(),
            y.data_ptr(),
            tokens * heads,
            width,
            eps,
        )
        return y

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        assert residual.is_contiguous(), "add_rms_norm adds in place: residual must be contiguous"
        rows, width = x.shape
        y = self._recorder.new(rows, width, dtype=x.dtype)
        code, weight_code = _norm_codes(x, weight)
        self.native.norm(
            code,
            x.data_ptr(),
            width,
            1,
            residual.data_ptr(),
            weight_code,
            weight.data_ptr(),
            y.data_ptr(),
            rows,
            width,
            eps,
        )
        return y

    def silu_and_mul(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        rows, width = x.shape
        y = self._recorder.new(rows, width // 2, dtype=x.dtype)
        self.native.silu_and_mul(DTYPE_CODES[x.dtype], x.data_ptr(), y.data_ptr(), rows, width // 2)
        return y

    def gelu_tanh_and_mul(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        rows, width = x.shape
        y = self._recorder.new(rows, width // 2, dtype=x.dtype)
        code = DTYPE_CODES[x.dtype]
        self.native.gelu_tanh_and_mul(code, x.data_ptr(), y.data_ptr(), rows, width // 2)
        return y

    def soft_cap(self, logits: Tensor, cap: float) -> Tensor:
        assert logits.is_contiguous(), "soft_cap works in place: logits must be contiguous"
        assert cap > 0, f"logits capped at {cap}"
        code = DTYPE_CODES[logits.dtype]
        self.native.soft_cap(code, logits.data_ptr(), logits.numel(), cap)
        return logits

    def new_kv_cache(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """(blocks, 2 for K and V, kv heads, groups of 16 tokens, 16 * head_size), uninitialised.

        Raises:
            ConfigError: for a block or head size that is no multiple of 16, or too large a head.
        """
        dtype_code(dtype)
        if block_size % GROUP or block_size < GROUP:
            raise ConfigError(
                f"--block-size {block_size}: the CPU kernels need a multiple of {GROUP}"
            )
        if head_size % GROUP or not GROUP <= head_size <= MAX_HEAD_SIZE:
            raise ConfigError(
                f"head size {head_size}: the CPU kernels need a multiple of {GROUP} up to "
                f"{MAX_HEAD_SIZE}; --override-op paged_attention=reference serves others, slowly"
            )
        shape = (num_blocks, 2, num_kv_heads, block_size // GROUP, GROUP * head_size)
        cache = torch.empty(shape, dtype=dtype)
        use_huge_pages(cache.data_ptr(), cache.numel() * cache.element_size())
        return cache

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
        tokens, num_heads, head_size = q.shape
        _, _, num_kv_heads, groups, _ = kv_cache.shape
        self.native.rotary_and_write_kv(
            DTYPE_CODES[q.dtype],
            q.data_ptr(),
            _token_stride(q, head_size),
            k.data_ptr(),
            _token_stride(k, head_size),
            v.data_ptr(),
            _token_stride(v, head_size),
            cos_sin.data_ptr(),
            positions.data_ptr(),
            slot_mapping.data_ptr(),
            kv_cache.data_ptr(),
            groups * GROUP,
            num_kv_heads,
            head_size,
            tokens,
            num_heads,
        )

    def paged_attention(
        self,
        q: Tensor,
        kv_cache: Tensor,
        plan: AttentionStep,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        assert softcap is None or softcap > 0, f"scores capped at {softcap}"
        tokens, num_heads, head_size = q.shape
        _, _, num_kv_heads, groups, _ = kv_cache.shape
        out = self._recorder.new(tokens, num_heads, head_size, dtype=q.dtype)
        self.native.attention(
            DTYPE_CODES[q.dtype],
            q.data_ptr(),
            _token_stride(q, head_size),
            out.data_ptr(),
            kv_cache.data_ptr(),
            groups * GROUP,
            num_kv_heads,
            head_size,
            plan.native,
            num_heads,
            scale,
            sliding_window or 0,
            softcap or 0.0,
        )
        return out


def _norm_codes(x: Tensor, weight: Tensor) -> tuple[int, int]:
    """The dtypes of the rows and of the weight, which may be float32 beside narrower rows."""
    code, weight_code = DTYPE_CODES[x.dtype], DTYPE_CODES[weight.dtype]
    assert weight_code in (code, 0), f"a norm's weight in {weight.dtype}, its rows in {x.dtype}"
    return code, weight_code


def _token_stride(rows: Tensor, head_size: int) -> int:
    """Elements from one token's heads to the next one's; the heads themselves lie side by side."""
    token, head, element = rows.stride()
    side_by_side = element == 1 and (head == head_size or rows.shape[1] == 1)
    assert side_by_side, f"heads of {head_size} at strides {rows.stride()}"
    return token


def load(path: str | None = None, num_threads: int | None = None, pin: bool = False) -> Ops:
    """The fastest path that this machine runs, or the one named.

    Args:
        path: one of `usable_paths()`; None reads LORA_SERVE_CPU_PATH, which may be unset.
        num_threads: None for torch's own number at this moment.
        pin: give each thread a core of its own, where `pin_threads` thinks that it helps.

    Raises:
        ConfigError: naming a path that does not exist or does not run here, and those that do.
    """
    wanted = path or os.environ.get(PATH_VARIABLE) or usable_paths()[0]
    if wanted not in usable_paths():
        raise ConfigError(
            f"{PATH_VARIABLE} {wanted!r}: this machine runs {', '.join(usable_paths())}"
        )
    kernels = CpuKernels(wanted, num_threads or torch.get_num_threads())
    if pin:
        pin_threads(kernels.native.thread_ids())
    return kernels.ops()
