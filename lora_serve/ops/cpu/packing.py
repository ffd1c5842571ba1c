"""Packs weights into the order of the native kernels, or gives what was packed before.

The one rule: what was kept is given in the order in which it was packed, and only for a weight of
the same kind, shape and dtype. Whose numbers they are is vouched for by who kept them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from lora_serve.ops._cpu import Backend, PackedQuantized, PackedScreen, PackedWeight
from lora_serve.ops.cpu.dtypes import dtype_code
from lora_serve.ops.kept_packing import NotAsKeptError, PackedParts
from lora_serve.ops.quantization import INT8, CodeFormat, QuantizedWeight

_Part = tuple[int, int]


class _HasParts(Protocol):
    @property
    def parts(self) -> list[_Part]: ...


Packed = TypeVar("Packed", bound=_HasParts | None)


class CpuPacking:
    """Packs weights, which are contiguous, by copying them. It is a `KeptPacking`, too."""

    def __init__(self, native: Backend) -> None:
        self._native = native
        self._noted: list[PackedParts] | None = None
        self._kept: Iterator[PackedParts] | None = None

    # ── kept weights ────────────────────────────────────────────────────────────────────────

    def note(self) -> list[PackedParts]:
        self._noted = []
        return self._noted

    def use(self, kept: Sequence[PackedParts]) -> None:
        self._kept = iter(kept)

    def stop(self) -> None:
        self._noted = self._kept = None

    # ── packing ─────────────────────────────────────────────────────────────────────────────

    def weight(self, weight: Tensor) -> PackedWeight:
        code, shape = dtype_code(weight.dtype), _shape(weight)
        return self._packed(
            f"{weight.dtype} {shape}",
            lambda: self._native.pack_weight(code, weight.data_ptr(), *shape),
            lambda kept: PackedWeight(code, *shape, kept.parts[0]),
        )

    def quantized(self, weight: Tensor, form: CodeFormat) -> PackedQuantized:
        code, shape = dtype_code(weight.dtype), _shape(weight)
        return self._packed(
            f"{weight.dtype} {shape} in {form.bits} bits by {form.group}",
            lambda: self._native.pack_quantized(
                code, weight.data_ptr(), form.bits, form.group, *shape
            ),
            lambda kept: PackedQuantized(kept.layout, form.group, *shape, kept.parts[0]),
            lambda packed: packed.layout,
        )

    def codes(self, weight: QuantizedWeight) -> PackedQuantized:
        """Scales and offsets are float32; they are packed in fewer bytes that give the same."""
        form, offsets, shape = weight.format, weight.offsets, _shape(weight.codes)
        numbers = "scales" if offsets is None else "scales and offsets"
        return self._packed(
            f"codes {shape} of {form.bits} bits by {form.group} with {numbers}",
            lambda: self._native.pack_codes(
                weight.codes.data_ptr(),
                weight.scales.data_ptr(),
                0 if offsets is None else offsets.data_ptr(),
                form.bits,
                form.group,
                *shape,
            ),
            lambda kept: PackedQuantized(kept.layout, form.group, *shape, kept.parts[0]),
            lambda packed: packed.layout,
        )

    def screen(self, weight: Tensor) -> PackedScreen | None:
        """The weight in bytes, and how far off they are; None if it cannot be screened."""
        weight = weight.detach().contiguous()
        code, shape = dtype_code(weight.dtype), _shape(weight)
        return self._packed(
            f"screen of {weight.dtype} {shape}",
            lambda: self._native.pack_screen(code, weight.data_ptr(), INT8.group, *shape),
            lambda kept: PackedScreen(INT8.group, *shape, list(kept.parts)) if kept.parts else None,
        )

    def _packed(
        self,
        what: str,
        pack: Callable[[], Packed],
        of_kept: Callable[[PackedParts], Packed],
        layout: Callable[[Packed], Sequence[int]] = lambda _: (),
    ) -> Packed:
        if self._kept is not None:
            kept = next(self._kept, None)
            if kept is None or kept.what != what:
                raise NotAsKeptError(f"{kept.what if kept else 'nothing'} was kept, not {what}")
            return of_kept(kept)
        packed = pack()
        if self._noted is not None:
            parts = () if packed is None else tuple(packed.parts)
            self._noted.append(PackedParts(what, parts, tuple(layout(packed)), packed))
        return packed


def _shape(matrix: Tensor) -> tuple[int, int]:
    out_features, in_features = matrix.shape
    return out_features, in_features
