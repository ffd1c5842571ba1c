"""KV events as the engine puts them together: what is recorded between steps goes out after each.

A batch that finds no room is not sent later: when there is room again, consumers are told
everything anew. So what they know is right, or they can see that something is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from lora_serve.config import EngineConfig
from lora_serve.engine.core.kv_event_publisher import EventPublisher
from lora_serve.engine.core.kv_event_wire import EventEncoder
from lora_serve.kv.event_recorder import KVEventRecorder
from lora_serve.kv.events import KVEvent
from lora_serve.model_info import ModelInfo


class Publisher(Protocol):
    """`EventPublisher`, or a test's own."""

    num_batches: int
    num_lost: int
    num_replays: int

    @property
    def has_caught_up(self) -> bool: ...

    def publish(self, events: Sequence[KVEvent]) -> bool: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class KVEvents:
    """A recorder of events, and the publisher that they go to.

    has_lost: a batch found no room, and consumers were not told everything anew since.
    """

    recorder: KVEventRecorder
    publisher: Publisher
    has_lost: bool = False

    def flush(self) -> None:
        """Publish what was recorded since the last call."""
        events = self.recorder.take()
        if self.has_lost and self.publisher.has_caught_up:
            self.recorder.begin_anew()
            events, self.has_lost = self.recorder.take(), False
        if events and not self.has_lost:
            self.has_lost = not self.publisher.publish(events)

    def close(self) -> None:
        """Publish the last of them, and end the publisher."""
        self.flush()
        self.publisher.close()


def make_events(
    config: EngineConfig, model: ModelInfo, publisher: EventPublisher, notify: Callable[[], None]
) -> KVEvents:
    """Start the publisher's thread, now that the model is known.

    notify: called from the tiers' threads when there is something to tell of them.
    """
    block_size, groups = config.cache.block_size, model.kv_groups
    encoder = EventEncoder(config.kv_events.kv_events_encoding, block_size, groups)
    publisher.start(encoder.encode)
    return KVEvents(KVEventRecorder(block_size, len(groups), notify), publisher)
