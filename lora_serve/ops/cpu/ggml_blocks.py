"""Takes the blocks of GGUF files apart on all cores.

What blocks hold is said by `lora_serve.models.checkpoints.ggml_blocks`, whose bits these are. Knows
no file.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lora_serve.ops.cpu.dtypes import dtype_code
from lora_serve.ops.cpu.threads import default_num_threads

Bytes = NDArray[np.uint8]
DEQUANTIZED = (torch.float32, torch.bfloat16)  # what blocks can become


class NativeBlocks:
    """Threads for one file's blocks. One caller at a time.

    type_name: as BLOCK_TYPES has it. blocks: (N, bytes of a block), contiguous. What is written to
    is contiguous, too, and as large as N blocks.
    """

    def __init__(self) -> None:
        # Not above: every start imports this module, and only files with blocks need the kernels.
        from lora_serve.ops._cpu import BlockReader

        self._native = BlockReader(default_num_threads())

    def unpack(
        self, type_name: str, blocks: Bytes, codes: Tensor, scales: Tensor, offsets: Tensor | None
    ) -> None:
        """Write codes (int8), scales and offsets (float32); offsets: None for types without."""
        self._native.unpack(
            type_name,
            blocks.ctypes.data,
            len(blocks),
            codes.data_ptr(),
            scales.data_ptr(),
            0 if offsets is None else offsets.data_ptr(),
        )

    def dequantize(self, type_name: str, blocks: Bytes, values: Tensor) -> None:
        """Write the weights, rounded to one of DEQUANTIZED."""
        self._native.dequantize(
            type_name, blocks.ctypes.data, len(blocks), dtype_code(values.dtype), values.data_ptr()
        )
