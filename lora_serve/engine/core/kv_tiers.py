"""The KV tiers as the engine puts them together, and when replaced adapters' KV leaves them."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import takewhile

import msgspec

from lora_serve.config import KVTierConfig
from lora_serve.engine.wire import error_info
from lora_serve.errors import NotForgottenError
from lora_serve.identity import AdapterRef, BlockHasher
from lora_serve.kv.connector import KVConnector
from lora_serve.kv.tiered_connector import TieredConnector, tier_namespaces
from lora_serve.kv_tiers.forgetting import Forgetting
from lora_serve.kv_tiers.opening import open_store
from lora_serve.messages import CallReply
from lora_serve.model_info import ModelInfo
from lora_serve.scheduler.request import Request

RESET_SECONDS = 8.0  # more than one try of any tier takes

Clock = Callable[[], float]


def make_connector(
    config: KVTierConfig, model: ModelInfo, hasher: BlockHasher, notify: Callable[[], None]
) -> KVConnector[Request]:
    """Make the connector over the tiers that `config` names, or over none.

    notify: called from the store's threads when a fetch has ended.

    Raises:
        ConfigError: a tier can never work as named.
    """
    store = open_store(config, notify)
    if store is None:
        return KVConnector()
    return TieredConnector(
        config,
        store,
        model.fingerprint,
        tier_namespaces(hasher, model),
        model.kv_block_bytes,
        time.monotonic,
        notify=notify,
    )


class PendingResets:
    """Replies to calls that forget KV, each until the tiers have answered or its deadline."""

    def __init__(self, seconds: float = RESET_SECONDS, clock: Clock = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        # By call_id, soonest due first.
        self._pending: dict[int, tuple[CallReply, Forgetting, float]] = {}

    @property
    def next_due(self) -> float | None:
        """When the first of these calls ends, whatever the tiers do."""
        return next((due for _, _, due in self._pending.values()), None)

    def add(self, reply: CallReply, forgetting: Forgetting) -> None:
        """Hold back `reply` until it is known whether the tiers have forgotten."""
        self._pending[reply.call_id] = reply, forgetting, self._clock() + self._seconds

    def take_ended(self) -> list[CallReply]:
        """The replies that can be given, with an error where a tier has not forgotten for good."""
        if not self._pending:
            return []
        now = self._clock()
        ended = [
            (reply, forgetting)
            for reply, forgetting, due in self._pending.values()
            if forgetting.is_settled or due <= now
        ]
        for reply, _ in ended:
            del self._pending[reply.call_id]
        return [_ended(reply, forgetting) for reply, forgetting in ended]


def _ended(reply: CallReply, forgetting: Forgetting) -> CallReply:
    obstacles = [f"{tier} ({why})" for tier, why in forgetting.obstacles.items()]
    if not obstacles:
        return reply
    error = NotForgottenError(
        f"this server uses that KV no more, but it is not yet forgotten by {', '.join(obstacles)}; "
        "it is tried again while this server runs: repeat the call until it succeeds, or the next "
        "server may find that KV again"
    )
    return msgspec.structs.replace(reply, error=error_info(error))


class StaleVersions:
    """Which version each name was last published with, and when the KV of its others may go.

    Not at once: a name that goes back to a version it had finds that version's KV.
    """

    def __init__(self, keep_seconds: float, clock: Clock = time.monotonic) -> None:
        self._keep_seconds = keep_seconds
        self._clock = clock
        self._due: dict[str, tuple[AdapterRef, float]] = {}  # soonest first

    @property
    def next_due(self) -> float | None:
        """When `take_due` will next give a version."""
        return next((due for _, due in self._due.values()), None)

    def published(self, ref: AdapterRef) -> None:
        self._due.pop(ref.name, None)
        self._due[ref.name] = ref, self._clock() + self._keep_seconds

    def take_due(self) -> list[AdapterRef]:
        """The latest versions of the names whose time has come, also of those unloaded since.

        Every step asks, so it looks no further than the first whose time has not come.
        """
        if not self._due:
            return []
        now = self._clock()
        refs = [ref for ref, _ in takewhile(lambda entry: entry[1] <= now, self._due.values())]
        for ref in refs:
            del self._due[ref.name]
        return refs
