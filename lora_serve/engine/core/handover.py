"""Answers that wait until another server can find their prompt's KV, each until its deadline.

Their requests have ended: they hold no block and no lease. Only their last output waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import msgspec

from lora_serve.kv.connector import KVConnector
from lora_serve.messages import EngineOutput
from lora_serve.scheduler.request import Request


class AnswersInHandover:
    """The last outputs, by the engine's request ids, soonest due first."""

    def __init__(
        self,
        connector: KVConnector[Request],
        deadline_ms: int,
        block_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connector = connector
        self._seconds = deadline_ms / 1e3
        self._block_size = block_size
        self._clock = clock
        self._outputs: dict[str, tuple[EngineOutput, float]] = {}

    @property
    def next_due(self) -> float | None:
        """When the first output leaves, whatever the tiers do; None if there is none."""
        return next((due for _, due in self._outputs.values()), None)

    @property
    def outputs(self) -> list[EngineOutput]:
        """The outputs that wait."""
        return [output for output, _ in self._outputs.values()]

    def has(self, request_id: str) -> bool:
        return request_id in self._outputs

    def add(self, output: EngineOutput) -> None:
        self._outputs[output.request_id] = output, self._clock() + self._seconds

    def take_ended(self) -> Iterator[EngineOutput]:
        """Give the outputs that need not wait any more, each with how much others can find."""
        if not self._outputs:
            return
        now = self._clock()
        for request_id, (output, due) in list(self._outputs.items()):
            handover = self._connector.handover(request_id)
            if handover is not None and handover.missing and now < due:
                continue
            del self._outputs[request_id]
            self._connector.end_handover(request_id)
            num_blocks = 0 if handover is None else handover.num_stored
            yield msgspec.structs.replace(output, num_stored_tokens=num_blocks * self._block_size)
