"""A step as rows: what each of them is, before it is brought to the device.

T rows of R requests, in the order in which the model computes them. Values only: the builder makes
them (`batch_builder.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
from torch import Tensor

from lora_serve.layers.biases import BiasChanges
from lora_serve.layers.expert_lora import ExpertChanges
from lora_serve.layers.vocabulary import EmbeddingChanges
from lora_serve.ops.contract import PackedAdapter
from lora_serve.ops.recorded_steps import Int32Array

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Outputs:
    """The N rows whose hidden states are asked for, of R' requests, where that is not all.

    rows: (N), int64, ascending: of each request its last ones. query_start_loc (R' + 1), seq_lens,
    block_tables, segments: as of BatchRows, of these rows alone; the tables are
    those of the last layer's group.
    """

    rows: Int64Array
    query_start_loc: tuple[int, ...]
    seq_lens: Int32Array
    block_tables: Int32Array
    segments: tuple[tuple[int, int, PackedAdapter], ...]
    biases: BiasChanges
    experts: ExpertChanges


class BatchRows(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A step's T rows of R requests on the host.

    num_rows: T. order[i]: index in the step of the request whose rows stand i-th.
    query_start_loc (R + 1): where its rows begin; the last entry is T.
    outputs: None if the hidden states of all rows are asked for. output_start_loc (R + 1): where
        those of a request begin among all that come out.
    samplers: indices in the step of the requests that sample. logits_indices (S): the
        hidden states that they sample from, as many of each as it has `asked.samples`.
    columns: (2 + groups, T), int64: input_ids, positions, and for each group its slot_mapping.
    pending_rows: (K), whose input ids are not known yet, and token_sources: (K) the requests
        for which the step before draws them, by their indices in that step.
    seq_lens (R), block_tables (R, longest) for each group: int32; tables are filled up with block
        0, which is not looked at.
    segments: (start, end, adapter), as ops.adapters.plan_lora wants them.
    is_embeds (T), inputs_embeds (T, H): CPU tensors, or None where every row is a token.
    embedding_changes, biases, experts: of rows whose adapters have any.
    """

    num_rows: int
    order: tuple[int, ...]
    query_start_loc: tuple[int, ...]
    outputs: Outputs | None
    output_start_loc: tuple[int, ...]
    samplers: tuple[int, ...]
    logits_indices: tuple[int, ...]
    columns: Int64Array
    pending_rows: tuple[int, ...]
    token_sources: tuple[int, ...]
    seq_lens: Int32Array
    block_tables: tuple[Int32Array, ...]
    segments: tuple[tuple[int, int, PackedAdapter], ...]
    is_embeds: Tensor | None
    inputs_embeds: Tensor | None
    embedding_changes: EmbeddingChanges
    biases: BiasChanges
    experts: ExpertChanges

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
