"""Gives a model its weights: read, and noted to be kept; or those that were kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from lora_serve.models.kept_weights.file import KeptCodes, Taken
from lora_serve.models.weights import TensorSource, WeightReader
from lora_serve.ops.kept_packing import NotAsKeptError
from lora_serve.ops.quantization import CodeFormat, QuantizedWeight

Kept = TypeVar("Kept")
Note = Callable[[int], object]

_NO_NUMBERS = torch.device("meta")


class NotingReader(WeightReader):
    """A `WeightReader` that remembers what `KeptReader` needs.

    tables: those that the model keeps as they are.
    """

    def __init__(
        self, source: TensorSource, dtype: torch.dtype, note: Note, *, keeps_codes: bool
    ) -> None:
        super().__init__(source, dtype, note=note, keeps_codes=keeps_codes)
        self.tables: dict[str, Tensor] = {}
        self._matrices: dict[str, tuple[int, ...]] = {}
        self._codes: dict[str, KeptCodes] = {}

    def take_matrix(self, name: str, *, may_be_codes: bool = True) -> Tensor | QuantizedWeight:
        weight = super().take_matrix(name, may_be_codes=may_be_codes)
        if isinstance(weight, Tensor):
            self._codes.pop(name, None)
            self._matrices[name] = tuple(weight.shape)
        return weight

    def take_codes(self, name: str) -> QuantizedWeight | None:
        weight = super().take_codes(name)
        if weight is not None:
            self._codes[name] = _facts(weight)
        return weight

    def take_table(self, name: str) -> Tensor:
        self.tables[name] = super().take_table(name)
        return self.tables[name]

    def taken(self) -> Taken:
        digests = {name: digest.hex() for name, digest in self.digests.items()}
        return Taken(digests, self._matrices, self._codes)


class KeptReader(WeightReader):
    """Gives weights that were kept: matrices without numbers, since they are packed already.

    Other tensors are small, and read from the checkpoint as ever.

    Raises:
        NotAsKeptError: when another tensor is asked for than before, or the checkpoint has another.
    """

    def __init__(
        self, source: TensorSource, dtype: torch.dtype, taken: Taken, tables: Mapping[str, Tensor]
    ) -> None:
        super().__init__(source, dtype)
        self.kept.update({name: codes.format[0] for name, codes in taken.codes.items()})
        self.digests.update({name: bytes.fromhex(text) for name, text in taken.digests.items()})
        self._taken = taken
        self._tables = tables

    def take(self, name: str) -> Tensor:
        before = self.digests.get(name)
        tensor = super().take(name)
        if self.digests[name] != before:
            raise NotAsKeptError(f"{name} has other numbers than before")
        return tensor

    def take_matrix(self, name: str, *, may_be_codes: bool = True) -> Tensor | QuantizedWeight:
        codes = self.take_codes(name) if may_be_codes else None
        if codes is not None:
            return codes
        return torch.empty(_found(self._taken.matrices, name), dtype=self.dtype, device=_NO_NUMBERS)

    def take_codes(self, name: str) -> QuantizedWeight | None:
        facts = self._taken.codes.get(name)
        return None if facts is None else _without_numbers(facts)

    def take_table(self, name: str) -> Tensor:
        return _found(self._tables, name)


def _found(kept: Mapping[str, Kept], name: str) -> Kept:
    try:
        return kept[name]
    except KeyError as error:
        raise NotAsKeptError(f"{name} was not kept") from error


def _facts(weight: QuantizedWeight) -> KeptCodes:
    form = weight.format
    return KeptCodes(
        format=(form.name, form.bits, form.group, form.least, form.most),
        shape=tuple(weight.codes.shape),
        groups=tuple(weight.scales.shape),
        scales_dtype=str(weight.scales.dtype).removeprefix("torch."),
        has_offsets=weight.offsets is not None,
    )


def _without_numbers(facts: KeptCodes) -> QuantizedWeight:
    groups, dtype = facts.groups, getattr(torch, facts.scales_dtype)
    return QuantizedWeight(
        CodeFormat(*facts.format),
        torch.empty(facts.shape, dtype=torch.int8, device=_NO_NUMBERS),
        torch.empty(groups, dtype=dtype, device=_NO_NUMBERS),
        torch.empty(groups, device=_NO_NUMBERS) if facts.has_offsets else None,
    )
