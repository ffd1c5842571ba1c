"""The adapters' weights on this worker, by digest: prepared in a thread, activated by steps.

Two tables, so that a digest can be prepared again while it still serves. The thread that prepares
only puts into `prepared`; everything else is the engine thread's. Each preparation is activated
once: two names may be loaded with the same bytes, the second while a step activates the first.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from lora_serve.adapter_checkpoint import AdapterCheckpoint, LoRAModule, RawTensor
from lora_serve.layers.rotary import HeadOrder
from lora_serve.models.base import LinearLayout
from lora_serve.ops.contract import LoRAPart, Ops, PackedAdapter
from lora_serve.worker.device import Device

_STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class AdapterWeights:
    """linears: the model's, or what this rank computes of them. dtype: the model's.

    Adapters are rounded to it.

    They lie on the device from `prepare` on.
    """

    def __init__(
        self, linears: Sequence[LinearLayout], ops: Ops, device: Device, dtype: torch.dtype
    ) -> None:
        self._ops = ops
        self._device = device
        self._dtype = dtype
        self._linears = linears
        self._lock = threading.Lock()  # over _prepared
        self._prepared: dict[bytes, list[PackedAdapter]] = {}
        self._active: dict[bytes, PackedAdapter] = {}

    def prepare(self, checkpoint: AdapterCheckpoint) -> None:
        """Pack an adapter, whose modules' shapes were checked, for a later `change`."""
        with self._device.loading():
            packed = self._ops.adapters.pack_adapter(self._linear_parts(checkpoint))
        with self._lock:
            self._prepared.setdefault(checkpoint.digest, []).append(packed)

    def discard(self, digest: bytes) -> None:
        """Forget what `prepare` made last of this adapter; no step will add it."""
        self._take_prepared(digest)

    def _linear_parts(self, checkpoint: AdapterCheckpoint) -> list[list[LoRAPart]]:
        """The parts of each linear layer, on the device."""
        modules = {module.name: module for module in checkpoint.modules}
        linears: list[list[LoRAPart]] = []
        for linear in self._linears:
            parts, out_start = [], 0
            for name, out_features in linear.projections:
                if name in modules:
                    parts.append(self._part(modules.pop(name), out_start, linear.head_order))
                out_start += out_features
            linears.append(parts)
        assert not modules, f"{checkpoint.path} was verified, yet changes {sorted(modules)}"
        return linears

    def change(self, drop: Sequence[bytes], add: Sequence[bytes]) -> tuple[PackedAdapter, ...]:
        """Forget the weights of `drop`, then let steps use the prepared weights of `add`.

        Returns what was dropped, to be kept until all steps before are done: a load beside them may
        take its memory at once.
        """
        dropped = tuple(self._active.pop(digest) for digest in drop)
        for digest in add:
            self._active[digest] = self._take_prepared(digest)
        return dropped

    def __getitem__(self, digest: bytes) -> PackedAdapter:
        return self._active[digest]

    def _take_prepared(self, digest: bytes) -> PackedAdapter:
        with self._lock:
            copies = self._prepared[digest]
            packed = copies.pop()
            if not copies:
                del self._prepared[digest]
        return packed

    def _part(self, module: LoRAModule, out_start: int, order: HeadOrder | None) -> LoRAPart:
        a, b = self._tensor(module.a), self._tensor(module.b)
        if order is not None:
            b = order.reorder(b, out_start)
        return LoRAPart(a, b, module.scale, out_start)

    def _tensor(self, raw: RawTensor) -> Tensor:
        stored = torch.frombuffer(bytearray(raw.data), dtype=_STORED_DTYPES[raw.dtype])
        return self._device.upload(stored.view(raw.shape).to(self._dtype))
