"""One step's tensors, as layers see them. Knows nothing of requests: rows, positions, tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lora_serve.layers.biases import BiasChanges
from lora_serve.layers.expert_lora import ExpertChanges
from lora_serve.layers.vocabulary import EmbeddingChanges
from lora_serve.ops.contract import AttentionPlan, LoRAPlan


@dataclass(frozen=True, slots=True)
class OutputRows:
    """The rows whose hidden states are asked for, where that is not all: N of R' requests.

    The last layer goes on with them alone, once it has written the KV of all rows.

    rows: (N), int64, ascending; of each request its last ones. attention, lora: plans of these N.
    attention: by layer, of the last one alone. biases, experts: of these rows.
    """

    rows: Tensor
    attention: Mapping[int, AttentionPlan]
    lora: LoRAPlan | None
    biases: BiasChanges = ()
    experts: ExpertChanges = ()


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T rows of R requests, concatenated in order.

    input_ids: (T), int64. inputs_embeds: (T, H) in the model's dtype, or None when every row is a
        token; `is_embeds` (T), bool, then says which rows it supplies.
    positions: (T), int64, absolute.
    slot_mapping: of each layer (T), int64, block_id * block_size + offset.
    attention: of each layer what ops.attention.plan_attention gave. Layers of one block table share
        both.
    lora: from ops.adapters.plan_lora, None when no row has an adapter.
    outputs: None if all rows' hidden states are asked for.
    embedding_changes, biases, experts: of rows whose adapters have any.
    """

    input_ids: Tensor
    positions: Tensor
    slot_mapping: Sequence[Tensor]
    attention: Sequence[AttentionPlan]
    lora: LoRAPlan | None = None
    inputs_embeds: Tensor | None = None
    is_embeds: Tensor | None = None
    outputs: OutputRows | None = None
    embedding_changes: EmbeddingChanges = ()
    biases: BiasChanges = ()
    experts: ExpertChanges = ()
