"""KV events as vLLM's consumers read them: msgpack, `[ts, [event, …], data_parallel_rank]`.

An event is a map by field names, or an array by places, as vLLM wrote it earlier. A block's hash is
the last 8 bytes of ours as a number, since consumers of both kinds take that and nothing longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from lora_serve.identity import BlockHash
from lora_serve.kv.events import BlockRemoved, BlockStored, KVEvent
from lora_serve.kv_groups import KVGroup

_RANK = 0
_STORED_FIELDS = (
    *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    *("lora_name", "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
)
_NUM_REQUIRED = 7  # of them; what is nothing behind them is left out
_REMOVED_FIELDS = ("block_hashes", "medium", "group_idx")
_NUM_REQUIRED_OF_REMOVED = 2

Fields = dict[str, object]


class EventEncoder:
    """Writes batches. groups: of the model's layers."""

    def __init__(self, encoding: str, block_size: int, groups: Sequence[KVGroup]) -> None:
        self._write: Callable[[KVEvent], object] = self._map if encoding == "map" else self._array
        self._block_size = block_size
        self._groups = groups
        self._tells_groups = len(groups) > 1 or groups[0].window is not None
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, timestamp: float, events: Sequence[KVEvent]) -> bytes:
        """One message's payload. timestamp: seconds since 1970."""
        return self._encoder.encode([timestamp, [self._write(event) for event in events], _RANK])

    def _map(self, event: KVEvent) -> Fields:
        named: Fields = {"type": type(event).__name__}
        if isinstance(event, BlockStored):
            required, rest = _split(self._stored(event), _NUM_REQUIRED)
            if event.namespace.salt:
                rest["cache_salt"] = event.namespace.salt
        elif isinstance(event, BlockRemoved):
            required, rest = _split(self._removed(event), _NUM_REQUIRED_OF_REMOVED)
        else:
            return named
        return named | required | {key: value for key, value in rest.items() if value is not None}

    def _array(self, event: KVEvent) -> list[object]:
        if isinstance(event, BlockStored):
            values, num_required = list(self._stored(event).values()), _NUM_REQUIRED
        elif isinstance(event, BlockRemoved):
            values, num_required = list(self._removed(event).values()), _NUM_REQUIRED_OF_REMOVED
        else:
            values, num_required = [], 0
        while len(values) > num_required and values[-1] is None:
            values.pop()
        return [type(event).__name__, *values]

    def _stored(self, event: BlockStored) -> Fields:
        namespace, group = event.namespace, self._groups[event.group]
        kind = "full_attention" if group.window is None else "sliding_window"
        values = (
            [_number(block_hash) for block_hash in event.block_hashes],
            None if event.parent is None else _number(event.parent),
            event.token_ids,
            self._block_size,
            namespace.lora_id,
            event.medium.value,
            namespace.lora_name,
            _extra_keys(event),
            *((event.group, kind, group.window) if self._tells_groups else (None, None, None)),
        )
        return dict(zip(_STORED_FIELDS, values, strict=True))

    def _removed(self, event: BlockRemoved) -> Fields:
        hashes = [_number(block_hash) for block_hash in event.block_hashes]
        values = hashes, event.medium.value, event.group if self._tells_groups else None
        return dict(zip(_REMOVED_FIELDS, values, strict=True))


def _number(block_hash: BlockHash) -> int:
    return int.from_bytes(block_hash[-8:], "big")


def _extra_keys(event: BlockStored) -> list[list[str] | None] | None:
    """What besides the tokens and the name shaped each block; the salt only for a chain's first."""
    keys = [[tag] if tag else [] for tag in event.embeds]
    if keys and event.parent is None and event.namespace.salt:
        keys[0].insert(0, event.namespace.salt)
    return [key or None for key in keys] if any(keys) else None


def _split(named: Fields, num_first: int) -> tuple[Fields, Fields]:
    items = list(named.items())
    return dict(items[:num_first]), dict(items[num_first:])
