"""Makes what runs the steps of a loaded model, eager or recorded, over KV caches of its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from lora_serve.distributed.group import ALONE, Group
from lora_serve.ops.contract import Ops
from lora_serve.ops.recorded_steps import NotRecordableError
from lora_serve.worker.adapter_weights import AdapterWeights
from lora_serve.worker.batch_builder import BatchBuilder
from lora_serve.worker.kv_layout import KVLayout
from lora_serve.worker.loaded_model import LoadedModel
from lora_serve.worker.model_runner import ModelRunner
from lora_serve.worker.step_graphs import (
    GraphSizes,
    StepGraphs,
    StepRecorder,
    exact_sizes,
    graph_sizes,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """What bounds the steps of one model, and which of them are recorded.

    enforce_eager, most_recorded_rows: as ModelConfig has them. max_draft_rows: as of StepLimits.
    with_lora: whether steps have adapters.
    """

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_draft_rows: int
    enforce_eager: bool
    most_recorded_rows: int
    with_lora: bool

    def recorder(
        self, model: LoadedModel, layout: KVLayout, kv_caches: Sequence[Tensor]
    ) -> StepRecorder | None:
        """Make the recorder of steps; None if they are not to be recorded, or cannot be."""
        plans = model.ops.graph_plans
        if plans is None or self.enforce_eager:
            return None
        return StepRecorder(
            model.device,
            plans,
            partial(model.model.forward, kv_caches=layout.by_layer(kv_caches)),
            self._graph_sizes(model.ops),
            record=model.ops.record or model.device.record,
            max_blocks=-(-model.max_model_len // self.block_size),
            block_size=self.block_size,
            group_of=layout.group_of,
            with_lora=self.with_lora,
        )

    def _graph_sizes(self, ops: Ops) -> GraphSizes:
        most_rows = self.most_recorded_rows
        if ops.record is not None:
            return exact_sizes(self.max_num_seqs, most_rows, self.max_draft_rows)
        return graph_sizes(self.max_num_seqs, self.max_num_batched_tokens, most_rows)

    def runner(
        self,
        model: LoadedModel,
        layout: KVLayout,
        kv_caches: Sequence[Tensor],
        adapters: AdapterWeights,
        recorder: StepRecorder | None,
        group: Group = ALONE,
    ) -> ModelRunner:
        """recorder: None runs all steps eagerly. group: as of ModelRunner."""
        device, hidden_size = model.device, model.spec.hidden_size
        builder = BatchBuilder(
            model.ops, device, self.block_size, hidden_size, model.dtype, layout.group_of
        )
        return ModelRunner(
            device,
            model.model,
            model.sampler,
            model.screening,
            layout.by_layer(kv_caches),
            builder,
            adapters,
            _recorded(recorder) if recorder is not None else None,
            group,
        )


def _recorded(recorder: StepRecorder) -> StepGraphs | None:
    try:
        return recorder.record()
    except NotRecordableError as error:
        logger.info("steps are not recorded: %s", error)
        return None
