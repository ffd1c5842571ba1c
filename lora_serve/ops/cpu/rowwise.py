"""The native kernels that take every row by itself: embedding, norms, activations, soft cap."""

from __future__ import annotations

from torch import Tensor

from lora_serve.ops._cpu import Backend
from lora_serve.ops.cpu.dtypes import DTYPE_CODES, dtype_code
from lora_serve.ops.cpu.recording import Recorder
from lora_serve.ops.cpu.strides import token_stride


class CpuRowwise:
    """`RowwiseKernels` on one path."""

    def __init__(self, native: Backend, recorder: Recorder) -> None:
        self._native = native
        self._recorder = recorder

    def embed(self, weight: Tensor, input_ids: Tensor, scale: float | None) -> Tensor:
        vocab_size, hidden_size = weight.shape
        assert weight.is_contiguous(), "embed reads rows by address"
        input_ids = input_ids.contiguous()
        y = self._recorder.new(len(input_ids), hidden_size, dtype=weight.dtype)
        self._native.embed(
            weight.data_ptr(),
            input_ids.data_ptr(),
            y.data_ptr(),
            len(input_ids),
            hidden_size * weight.itemsize,
            vocab_size,
        )
        if scale is not None:
            self._native.scale(dtype_code(y.dtype), y.data_ptr(), y.numel(), scale)
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        tokens, heads, width = x.shape if x.dim() == 3 else (len(x), 1, x.shape[1])
        y = self._recorder.new(*x.shape, dtype=x.dtype)
        code, weight_code = _norm_codes(x, weight)
        self._native.norm(
            code,
            x.data_ptr(),
            token_stride(x.view(tokens, heads, width), width),
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
        self._native.norm(
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

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        x = x.contiguous()
        rows, width = x.shape
        y = self._recorder.new(rows, width, dtype=x.dtype)
        for each in (weight, bias):
            assert each is None or (each.dtype == x.dtype and each.shape == x.shape[1:])
        self._native.layer_norm(
            DTYPE_CODES[x.dtype],
            x.data_ptr(),
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            y.data_ptr(),
            rows,
            width,
            eps,
        )
        return y

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        x = x.contiguous()
        assert residual.is_contiguous(), "add works in place: residual must be contiguous"
        assert (x.shape, x.dtype) == (residual.shape, residual.dtype), "x is not like residual"
        code = DTYPE_CODES[x.dtype]
        self._native.add(code, x.data_ptr(), residual.data_ptr(), x.numel())
        return residual

    def scale(self, x: Tensor, factor: float) -> Tensor:
        assert x.is_contiguous(), "scale works in place: x must be contiguous"
        self._native.scale(DTYPE_CODES[x.dtype], x.data_ptr(), x.numel(), factor)
        return x

    def silu_and_mul(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        rows, width = x.shape
        y = self._recorder.new(rows, width // 2, dtype=x.dtype)
        self._native.silu_and_mul(
            DTYPE_CODES[x.dtype], x.data_ptr(), y.data_ptr(), rows, width // 2
        )
        return y

    def gelu_tanh_and_mul(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        rows, width = x.shape
        y = self._recorder.new(rows, width // 2, dtype=x.dtype)
        code = DTYPE_CODES[x.dtype]
        self._native.gelu_tanh_and_mul(code, x.data_ptr(), y.data_ptr(), rows, width // 2)
        return y

    def gelu_tanh(self, x: Tensor) -> Tensor:
        assert x.is_contiguous(), "gelu_tanh works in place: x must be contiguous"
        self._native.gelu_tanh(DTYPE_CODES[x.dtype], x.data_ptr(), x.numel())
        return x

    def soft_cap(self, logits: Tensor, cap: float) -> Tensor:
        assert logits.is_contiguous(), "soft_cap works in place: logits must be contiguous"
        assert cap > 0, f"logits capped at {cap}"
        code = DTYPE_CODES[logits.dtype]
        self._native.soft_cap(code, logits.data_ptr(), logits.numel(), cap)
        return logits


def _norm_codes(x: Tensor, weight: Tensor) -> tuple[int, int]:
    """The dtypes of the rows and of the weight, which may be float32 beside narrower rows."""
    code, weight_code = DTYPE_CODES[x.dtype], DTYPE_CODES[weight.dtype]
    assert weight_code in (code, 0), f"a norm's weight in {weight.dtype}, its rows in {x.dtype}"
    return code, weight_code
