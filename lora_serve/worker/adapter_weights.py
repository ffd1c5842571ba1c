"""The adapters' weights on this worker, by digest: prepared in a thread, activated by steps.

Two tables, so that a digest can be prepared again while it still serves. The thread that prepares
only puts into `prepared`; everything else is the engine thread's. Each preparation is activated
once: two names may be loaded with the same bytes, the second while a step activates the first.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor

from lora_serve.adapter_checkpoint import AdapterCheckpoint, LoRAModule, ModuleBias, RawTensor
from lora_serve.identity import BASE_MODEL
from lora_serve.layers.biases import LayerBiases
from lora_serve.layers.expert_lora import ExpertAdapters
from lora_serve.layers.vocabulary import EmbeddingChange, HeadChange, HeadChanges
from lora_serve.model_info import Vocabulary
from lora_serve.models.base import LinearLayout
from lora_serve.ops.contract import LoRAPart, Ops, PackedAdapter
from lora_serve.step import ScheduledRequest
from lora_serve.worker.adapter_vocabulary import VocabularyReader
from lora_serve.worker.device import Device

_NO_BIASES: Mapping[str, Tensor] = {}
_STORED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True, slots=True)
class PreparedAdapter:
    """Weights on the device. embedding, head: None where the adapter leaves them as they are.

    biases, experts: empty where it has none.
    """

    packed: PackedAdapter
    biases: LayerBiases
    experts: ExpertAdapters
    embedding: EmbeddingChange | None = None
    head: HeadChange | None = None


class AdapterWeights:
    """linears: the model's, with experts', or what this rank computes of them. dtype: the model's.

    Adapters are rounded to it. vocabulary: the model's; None where adapters cannot change it.
    base_biases: the model's own, float32, by the names of their tensors.

    They lie on the device from `prepare` on.
    """

    def __init__(
        self,
        linears: Sequence[LinearLayout],
        ops: Ops,
        device: Device,
        dtype: torch.dtype,
        vocabulary: Vocabulary | None = None,
        base_biases: Mapping[str, Tensor] = _NO_BIASES,
    ) -> None:
        self._ops = ops
        self._device = device
        self._dtype = dtype
        self._linears = [linear for linear in linears if linear.expert is None]
        self._linears_of_experts = _by_expert(linears)
        self._base_biases = base_biases
        self._lock = threading.Lock()  # over _prepared
        self._prepared: dict[bytes, list[PreparedAdapter]] = {}
        self._active: dict[bytes, PreparedAdapter] = {}
        # By digest, of the active ones that have any: most steps find nothing to ask for.
        self.embedding_changes: dict[bytes, EmbeddingChange] = {}
        self.head_changes: dict[bytes, HeadChange] = {}
        self.biases: dict[bytes, LayerBiases] = {}
        self.experts: dict[bytes, ExpertAdapters] = {}
        self._reader: VocabularyReader | None = None
        if vocabulary is not None:
            names = vocabulary.embedding, vocabulary.head
            self._reader = VocabularyReader(ops, self._tensor, *names)

    def prepare(self, checkpoint: AdapterCheckpoint) -> None:
        """Pack an adapter, whose modules' shapes were checked, for a later `change`."""
        with self._device.loading():
            prepared = self._pack(checkpoint)
        with self._lock:
            self._prepared.setdefault(checkpoint.digest, []).append(prepared)

    def discard(self, digest: bytes) -> None:
        """Forget what `prepare` made last of this adapter; no step will add it."""
        self._take_prepared(digest)

    def _pack(self, checkpoint: AdapterCheckpoint) -> PreparedAdapter:
        modules = {module.name: module for module in checkpoint.modules}
        token_rows = {rows.name: rows for rows in checkpoint.token_rows}
        embedding, head = None, None
        if self._reader is not None:
            embedding = self._reader.embedding_change(modules, token_rows)
            head = self._reader.head_change(modules, token_rows)
            for name in (self._reader.embedding, self._reader.head):
                modules.pop(name, None)
                token_rows.pop(name, None)
        packed = self._ops.adapters.pack_adapter(self._linear_parts(self._linears, modules))
        experts = self._packed_experts(modules)
        left = sorted({*modules, *token_rows})
        assert not left, f"{checkpoint.path} was verified, yet changes {left}"
        biases = self._layer_biases(checkpoint.biases)
        return PreparedAdapter(packed, biases, experts, embedding, head)

    def _packed_experts(self, modules: dict[str, LoRAModule]) -> ExpertAdapters:
        """What is left in `modules` of experts', which is taken out."""
        if not modules:
            return ()
        pack = self._ops.adapters.pack_adapter
        return tuple(
            pack(self._linear_parts(linears, modules)) for linears in self._linears_of_experts
        )

    def _layer_biases(self, biases: Sequence[ModuleBias]) -> LayerBiases:
        """What is added to each linear layer's outputs, of those that get something."""
        found: dict[int, Tensor] = {}
        for linear in self._linears:
            names = {name for name, _ in linear.projections}
            is_first = linear.columns.start == 0  # of the segments that are added up
            if not is_first or not any(bias.name in names for bias in biases):
                continue
            parts = [self._bias_of(name, size, biases) for name, size in linear.projections]
            added = torch.cat(parts)
            if linear.head_order is not None:
                added = linear.head_order.reorder(added)
            if added.any():
                found[linear.index] = self._device.upload(added)
        return found

    def _bias_of(self, name: str, size: int, biases: Sequence[ModuleBias]) -> Tensor:
        """What is added to one projection's outputs (size), float32, on the CPU."""
        added = torch.zeros(size)
        for bias in biases:
            if bias.name == name and bias.scale is not None:
                added += bias.scale * _stored(bias.values).float()
            elif bias.name == name:
                # Rounded as the model's own is: one that was not trained adds nothing.
                added += _stored(bias.values).to(self._dtype).float()
                added -= self._base_biases.get(f"{name}.bias", torch.zeros(size))
        return added

    def _linear_parts(
        self, layouts: Sequence[LinearLayout], modules: dict[str, LoRAModule]
    ) -> list[list[LoRAPart]]:
        """The parts of each linear layer, on the device, taken out of `modules`."""
        taken = set()
        linears: list[list[LoRAPart]] = []
        for linear in layouts:
            parts, out_start = [], 0
            for name, out_features in linear.projections:
                if name in modules:
                    parts.append(self._part(modules[name], out_start, linear))
                    taken.add(name)
                out_start += out_features
            linears.append(parts)
        for name in taken:
            del modules[name]
        return linears

    def change(self, drop: Sequence[bytes], add: Sequence[bytes]) -> tuple[PreparedAdapter, ...]:
        """Forget the weights of `drop`, then let steps use the prepared weights of `add`.

        Returns what was dropped, to be kept until all steps before are done: a load beside them may
        take its memory at once.
        """
        dropped = tuple(self._active.pop(digest) for digest in drop)
        for digest in drop:
            self.embedding_changes.pop(digest, None)
            self.head_changes.pop(digest, None)
            self.biases.pop(digest, None)
            self.experts.pop(digest, None)
        for digest in add:
            self._active[digest] = added = self._take_prepared(digest)
            if added.embedding is not None:
                self.embedding_changes[digest] = added.embedding
            if added.head is not None:
                self.head_changes[digest] = added.head
            if added.biases:
                self.biases[digest] = added.biases
            if added.experts:
                self.experts[digest] = added.experts
        return dropped

    def __getitem__(self, digest: bytes) -> PackedAdapter:
        return self._active[digest].packed

    def head_changes_of(
        self, requests: Sequence[ScheduledRequest], counts: Sequence[int]
    ) -> HeadChanges:
        """What adapters change of the LM head, in rows of which `requests` have `counts`."""
        found: list[tuple[int, int, HeadChange]] = []
        rows = zip(requests, pairwise(accumulate(counts, initial=0)), strict=True)
        for adapter, group in groupby(rows, key=lambda row: row[0].adapter):
            bounds = [each for _, each in group]
            start, end = bounds[0][0], bounds[-1][1]
            change = None if adapter is BASE_MODEL else self.head_changes.get(adapter.digest)
            if change is not None and start < end:
                found.append((start, end, change))
        return found

    def _take_prepared(self, digest: bytes) -> PreparedAdapter:
        with self._lock:
            copies = self._prepared[digest]
            prepared = copies.pop()
            if not copies:
                del self._prepared[digest]
        return prepared

    def _part(self, module: LoRAModule, out_start: int, linear: LinearLayout) -> LoRAPart:
        a, b = self._tensor(module.a), self._tensor(module.b)
        if linear.segment is not None:
            a = a[:, linear.segment.start : linear.segment.stop].contiguous()
        if linear.head_order is not None:
            b = linear.head_order.reorder(b, out_start)
        return LoRAPart(a, b, module.scale, out_start)

    def _tensor(self, raw: RawTensor) -> Tensor:
        return self._device.upload(_stored(raw).to(self._dtype))


def _by_expert(linears: Sequence[LinearLayout]) -> list[list[LinearLayout]]:
    """Each expert's linear layers, in the order of their index."""
    found: dict[int, list[LinearLayout]] = {}
    for linear in linears:
        if linear.expert is not None:
            found.setdefault(linear.expert, []).append(linear)
    return [found[number] for number in sorted(found)]


def _stored(raw: RawTensor) -> Tensor:
    """A copy on the CPU, as it is stored."""
    stored = torch.frombuffer(bytearray(raw.data), dtype=_STORED_DTYPES[raw.dtype])
    return stored.view(raw.shape)
