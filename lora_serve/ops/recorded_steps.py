"""Steps that are captured once and replayed: what a backend gives for them.

A capture notes kernels with the addresses that they read and write. So plans lie at fixed addresses
and are filled in before each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Int32Array = npt.NDArray[np.int32]

AdapterInT = TypeVar("AdapterInT", contravariant=True)
LoRAPlanT = TypeVar("LoRAPlanT")
AttentionPlanT = TypeVar("AttentionPlanT")


class NotRecordableError(Exception):
    """A forward does something that a backend's recording would leave out; it says what."""


class RecordedWork(Protocol):
    """output: what was returned when it was recorded; each replay writes it anew."""

    output: Tensor

    def replay(self) -> None:
        """Do all of it again, on what the memory holds by then."""


# Notes what a forward would do, as Device.record does. Raises NotRecordableError.
Record = Callable[[Callable[[], Tensor]], RecordedWork]


class GraphPlans(Protocol[AdapterInT, LoRAPlanT, AttentionPlanT]):
    """Plans at fixed addresses, for steps that are captured once and replayed.

    A captured plan is for exactly `num_rows` rows. It is made without any request: its kernels then
    read and write nothing of the KV cache and of adapters. `fill` makes its first rows those of the
    given requests and the rest padding again, by copies ordered on the current stream (the captured
    kernels see what was filled last), without waiting for the device. A captured kernel's grid
    depends on what the plan was made with alone. Padding rows have slot -1, which
    rotary_and_write_kv does not write, and sequence length 0, whose attention is 0.
    """

    def new_attention_plan(
        self, num_rows: int, max_blocks: int, block_size: int, is_decode: bool, /
    ) -> AttentionPlanT:
        """max_blocks: of one request. is_decode: every request has one row."""

    def fill_attention_plan(
        self,
        plan: AttentionPlanT,
        query_start_loc: Int32Array,
        seq_lens: Int32Array,
        block_tables: Int32Array,
        /,
    ) -> None:
        """Fill it with requests as plan_attention takes them, in arrays of the host."""

    def new_lora_plan(self, num_rows: int, /) -> LoRAPlanT: ...

    def fill_lora_plan(
        self, plan: LoRAPlanT, segments: Sequence[tuple[int, int, AdapterInT]], /
    ) -> None:
        """Fill it with segments as plan_lora takes them.

        The caller keeps their adapters alive until the device has run the step.
        """


class HostCalls(Protocol):
    """Work of the host between kernels, which a recorded step does again in its place."""

    def new(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor for what such work writes."""

    def run(self, call: Callable[[], None]) -> None:
        """Do it, or note it while a step is recorded."""
