"""Dtypes as the native kernels know them."""

from __future__ import annotations

import torch

from lora_serve.errors import ConfigError

# csrc/cpu/dtype.h
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def dtype_code(dtype: torch.dtype) -> int:
    code = DTYPE_CODES.get(dtype)
    if code is None:
        raise ConfigError(
            f"dtype {dtype} has no CPU kernels; choose one of {', '.join(map(str, DTYPE_CODES))}"
        )
    return code
