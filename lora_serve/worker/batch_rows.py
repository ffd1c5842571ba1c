"""A step as rows: what each of them is, before it is brought to the device.

T rows of R requests, in the order in which the model computes them. Values only: the builder makes
them (`batch_builder.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lora_serve.layers.biases import BiasChanges
from lora_serve.layers.expert_lora import ExpertChanges
from lora_serve.layers.vocabulary import EmbeddingChanges
from lora_serve.ops.contract import PackedAdapter


def as_tensor(values: Sequence[int], dtype: type[np.integer]) -> Tensor:
    """A CPU tensor of some numbers; torch itself takes ten times as long to make one of few."""
    return torch.from_numpy(np.array(values, dtype))


@dataclass(frozen=True, slots=True)
class Outputs:
    """The N rows whose hidden states are asked for, of R' requests, where that is not all.

    rows: (N), int64, ascending: of each request its last ones. query_start_loc (R' + 1), seq_lens,
    block_tables, segments: as of BatchRows, of these rows alone; the tables are
    those of the last layer's group.
    """

    rows: npt.NDArray[np.int64]
    query_start_loc: tuple[int, ...]
    seq_lens: Tensor
    block_tables: Tensor
    segments: tuple[tuple[int, int, PackedAdapter], ...]
    biases: BiasChanges
    experts: ExpertChanges


@dataclass(frozen=True, slots=True)
class BatchRows:
    """A step's T rows of R requests on the host.

    order[i]: index in the step of the request whose rows stand i-th. query_start_loc (R + 1):
        where its rows begin; the last entry is T.
    outputs: None if the hidden states of all rows are asked for. output_start_loc (R + 1): where
        those of a request begin among all that come out.
    samplers: indices in the step of the requests that sample. logits_indices (S), int64: the
        hidden states that they sample from, as many of each as it has `asked.samples`.
    input_ids, positions: (T), int64. slot_mapping: (T), int64, for each group.
    pending_rows: (K), int64, whose input ids are not known yet, and token_sources: (K) the requests
        for which the step before draws them, by their indices in that step.
    seq_lens (R), block_tables (R, longest) for each group: int32,
        CPU tensors; tables are filled up with block 0, which is not looked at.
    segments: (start, end, adapter), as ops.adapters.plan_lora wants them.
    is_embeds (T), inputs_embeds (T, H): CPU tensors, or None where every row is a token.
    embedding_changes, biases, experts: of rows whose adapters have any.
    """

    order: tuple[int, ...]
    query_start_loc: tuple[int, ...]
    outputs: Outputs | None
    output_start_loc: tuple[int, ...]
    samplers: tuple[int, ...]
    logits_indices: npt.NDArray[np.int64]
    input_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slot_mapping: tuple[npt.NDArray[np.int64], ...]
    pending_rows: npt.NDArray[np.int64]
    token_sources: tuple[int, ...]
    seq_lens: Tensor
    block_tables: tuple[Tensor, ...]
    segments: tuple[tuple[int, int, PackedAdapter], ...]
    is_embeds: Tensor | None
    inputs_embeds: Tensor | None
    embedding_changes: EmbeddingChanges
    biases: BiasChanges
    experts: ExpertChanges

    @property
    def num_rows(self) -> int:
        return self.query_start_loc[-1]

    @property
    def is_decode(self) -> bool:
        """Whether each request has one row, a token's."""
        return len(self.order) == self.num_rows and self.is_embeds is None

    @property
    def all_sample(self) -> bool:
        """Whether logits_indices are all hidden states that come out, in their order."""
        num_outputs = self.num_rows if self.outputs is None else self.outputs.query_start_loc[-1]
        return len(self.logits_indices) == num_outputs


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Input tokens that the device has drawn and the host need not know: both (K), int64."""

    rows: Tensor
    token_ids: Tensor

    def put_into(self, input_ids: Tensor) -> None:
        input_ids.index_copy_(0, self.rows, self.token_ids)
