"""KV blocks of all layers as rows of bytes on the host, and back.

A row is one block's part of each layer, layer after layer; several may be read as one. torch's
indexing does it on any device. On CPUs bytes are copied once, by one thread; on GPUs with the
extension one launch copies all layers straight to and from pinned memory. Knows nothing of what the
bytes mean.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lora_serve.host_copies import HostCopy, in_use, to_device, to_host

logger = logging.getLogger(__name__)

_WORD_BYTES = 16  # csrc/cuda/block_copy.h


Row: TypeAlias = bytes | bytearray | memoryview


class RowsRead(Protocol):
    """Rows that may still be on their way."""

    def rows(self) -> tuple[bytes, ...]:
        """Wait for the rows: one for each block."""


class BlockRows(Protocol):
    """Rows of layers (num_blocks, B_l) of uint8, which it keeps. A row has sum of B_l bytes."""

    def read(self, block_ids: Sequence[int], blocks_a_row: int = 1) -> RowsRead:
        """Read blocks as they are when all that was asked for before is done.

        blocks_a_row: how many of them follow each other in a row.
        """

    def write(self, block_ids: Sequence[int], rows: Sequence[Row]) -> None:
        """Fill distinct blocks with rows as `read` gives them, before what next runs there."""


@dataclass(frozen=True, slots=True)
class KnownRows:
    """Rows that are here."""

    known: tuple[bytes, ...]

    def rows(self) -> tuple[bytes, ...]:
        return self.known


@dataclass(frozen=True, slots=True)
class CopiedRows:
    """copy: of (N, sum of B_l), uint8."""

    copy: HostCopy

    def rows(self) -> tuple[bytes, ...]:
        return tuple(row.tobytes() for row in self.copy.wait().numpy())


class TorchBlockRows:
    """The specification, and what serves on GPUs without the extension."""

    def __init__(self, layers: Sequence[Tensor]) -> None:
        self._layers = layers
        self._device = layers[0].device

    def read(self, block_ids: Sequence[int], blocks_a_row: int = 1) -> CopiedRows:
        index = to_device(torch.tensor(block_ids, dtype=torch.int64), self._device)
        rows = torch.cat([layer.index_select(0, index) for layer in self._layers], dim=1)
        return CopiedRows(to_host(rows.view(len(block_ids) // blocks_a_row, -1)))

    def write(self, block_ids: Sequence[int], rows: Sequence[Row]) -> None:
        index = to_device(torch.tensor(block_ids, dtype=torch.int64), self._device)
        sizes = [layer.shape[1] for layer in self._layers]
        parts = to_device(_stacked(rows, self._device), self._device).split(sizes, dim=1)
        for layer, part in zip(self._layers, parts, strict=True):
            layer.index_copy_(0, index, part)


class HostBlockRows:
    """Block rows on a CPU: each byte is copied once, in the caller's thread.

    torch's indexing would wake its own threads for each layer, and they spin for milliseconds
    after it where the kernels' threads want to compute.
    """

    def __init__(self, layers: Sequence[Tensor]) -> None:
        self._layers = [layer.numpy() for layer in layers]

    def read(self, block_ids: Sequence[int], blocks_a_row: int = 1) -> KnownRows:
        rows = (block_ids[i : i + blocks_a_row] for i in range(0, len(block_ids), blocks_a_row))
        return KnownRows(
            tuple(
                b"".join([layer[block_id] for block_id in row for layer in self._layers])
                for row in rows
            )
        )

    def write(self, block_ids: Sequence[int], rows: Sequence[Row]) -> None:
        for block_id, row in zip(block_ids, rows, strict=True):
            rest = np.frombuffer(row, np.uint8)
            for layer in self._layers:
                layer[block_id], rest = rest[: layer.shape[1]], rest[layer.shape[1] :]


class CudaBlockRows:
    """Layers of one size, a multiple of 16 bytes, on one GPU."""

    def __init__(self, layers: Sequence[Tensor], kernels: ModuleType) -> None:
        assert can_copy_natively(layers), "the native copy takes layers of one size only"
        self._layers = layers  # their addresses are in the table
        self._kernels = kernels
        self._device = layers[0].device
        self._block_bytes = layers[0].shape[1]
        addresses = [layer.data_ptr() for layer in layers]
        self._table = torch.tensor(addresses, dtype=torch.int64, device=self._device)
        # Pinned rows that kernels may be reading: torch's allocator knows nothing of that.
        self._lent: list[HostCopy] = []

    def read(self, block_ids: Sequence[int], blocks_a_row: int = 1) -> CopiedRows:
        row_bytes = blocks_a_row * len(self._layers) * self._block_bytes
        shape = (len(block_ids) // blocks_a_row, row_bytes)
        rows = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        self._copy(self._kernels.gather_blocks, block_ids, rows)
        return CopiedRows(in_use(rows))

    def write(self, block_ids: Sequence[int], rows: Sequence[Row]) -> None:
        pinned = _stacked(rows, self._device)
        self._copy(self._kernels.scatter_blocks, block_ids, pinned)
        self._lent = [lent for lent in self._lent if not lent.is_there]
        self._lent.append(in_use(pinned))

    def _copy(self, run: Callable[..., None], block_ids: Sequence[int], rows: Tensor) -> None:
        index = to_device(torch.tensor(block_ids, dtype=torch.int32), self._device)
        run(
            self._table.data_ptr(),
            len(self._layers),
            index.data_ptr(),
            len(block_ids),
            rows.data_ptr(),
            self._block_bytes,
            torch.cuda.current_stream().cuda_stream,
        )


def _stacked(rows: Sequence[Row], device: torch.device) -> Tensor:
    """(N, bytes of a row), uint8, on the host; pinned if it is for a GPU."""
    shape, is_pinned = (len(rows), len(rows[0])), device.type == "cuda"
    stacked = torch.empty(shape, dtype=torch.uint8, pin_memory=is_pinned)
    for target, row in zip(stacked.numpy(), rows, strict=True):
        target[:] = np.frombuffer(row, np.uint8)
    return stacked


def can_copy_natively(layers: Sequence[Tensor]) -> bool:
    sizes = {layer.shape[1] for layer in layers}
    return len(sizes) == 1 and sizes.pop() % _WORD_BYTES == 0


def open_block_rows(layers: Sequence[Tensor]) -> BlockRows:
    """The fastest way that this device and this installation have.

    Args:
        layers: (num_blocks, B_l), uint8, contiguous, all on one device.
    """
    if layers[0].device.type == "cpu":
        return HostBlockRows(layers)
    if not can_copy_natively(layers):
        return TorchBlockRows(layers)
    try:
        return CudaBlockRows(layers, importlib.import_module("lora_serve.ops._cuda"))
    except ImportError as error:
        logger.warning(
            "lora-serve was installed without its CUDA extension (%s); KV blocks are copied by "
            "torch, one layer at a time. Install the CUDA toolkit and reinstall.",
            error,
        )
        return TorchBlockRows(layers)
