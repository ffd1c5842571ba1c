"""Consumers of KV events: the decoders of llm-d and Dynamo as strict as they are, and an indexer.

What each of them accepts is taken from its sources: llm-d-router's pkg/kvevents/engineadapter, and
lib/kv-router/src/zmq_wire of Dynamo. They refuse what those would refuse, by ValueError.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq

LLM_D_FIELDS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
        *("lora_name", "extra_keys", "group_idx"),
        *("kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
DYNAMO_KINDS = ("full_attention", "sliding_window")


@dataclass
class Event:
    """What both decoders make of an event. media and kinds as written; hashes are numbers."""

    kind: str
    hashes: list[int] = field(default_factory=list)
    parent: int | None = None
    token_ids: list[int] = field(default_factory=list)
    block_size: int = 0
    medium: str = ""
    lora_name: str | None = None
    lora_id: int | None = None
    extra: list[list[str] | None] | None = None
    group: int | None = None
    spec_kind: str | None = None
    salt: str | None = None


Decode = Callable[[bytes], list[Event]]


def _batch(payload: bytes) -> list[Any]:
    batch = msgspec.msgpack.decode(payload)
    _require(isinstance(batch, list), "a batch is an array")
    _require(isinstance(batch[0], float), "a timestamp is a float")
    _require(isinstance(batch[1], list), "events are an array")
    return batch


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise ValueError(what)


def _number(value: Any) -> int:
    _require(type(value) is int and 0 <= value < 2**64, f"{value!r} is no 64-bit number")
    return int(value)


def decode_as_llm_d(payload: bytes) -> list[Event]:
    """An event is an array, or a map that becomes one by the names of its fields."""
    return [_llm_d_event(raw) for raw in _batch(payload)[1]]


def _llm_d_event(raw: Any) -> Event:
    if isinstance(raw, dict):
        tag = raw["type"]
        values = [raw.get(name) for name in LLM_D_FIELDS[tag]]
    else:
        _require(isinstance(raw, list), f"{raw!r} is neither an array nor a map")
        tag, values = raw[0], list(raw[1:])
    _require(tag in LLM_D_FIELDS, f"unknown tag {tag}")
    names = LLM_D_FIELDS[tag]
    if tag == "BlockStored":
        _require(len(values) >= 4, "BlockStored has four fields at least")
    named = dict(zip(names, [*values, *[None] * len(names)], strict=False))
    if tag == "AllBlocksCleared":
        return Event(tag)
    event = Event(tag, [_number(value) for value in named["block_hashes"]])
    event.medium = named["medium"] or ""
    event.group = None if named["group_idx"] is None else _number(named["group_idx"])
    if tag == "BlockStored":
        _fill_stored(event, named)
    return event


def _fill_stored(event: Event, named: dict[str, Any]) -> None:
    parent = named["parent_block_hash"]
    event.parent = None if parent is None else _number(parent)
    event.token_ids = [_number(token) for token in named["token_ids"]]
    event.block_size = _number(named["block_size"])
    event.lora_id = None if named["lora_id"] is None else _number(named["lora_id"])
    event.lora_name, event.extra = named["lora_name"], named["extra_keys"]
    event.spec_kind = named["kv_cache_spec_kind"]
    for keys in event.extra or ():
        _require(keys is None or isinstance(keys, list), "extra keys are arrays, or nothing")
    is_dense = not event.token_ids or (len(event.token_ids) == event.block_size * len(event.hashes))
    _require(is_dense, "tokens of whole blocks, or none")


def decode_as_dynamo(payload: bytes) -> list[Event]:
    """A batch has its rank. Hashes are numbers, tokens 32 bits; the tail of an array is typed."""
    batch = _batch(payload)
    _require(len(batch) == 3, "a batch is of three")
    _require(batch[2] is None or isinstance(batch[2], int), "a rank is a number")
    events = []
    for raw in batch[1]:
        event = _llm_d_event(raw)
        _require(all(token < 2**32 for token in event.token_ids), "a token has 32 bits")
        _require(event.spec_kind is None or event.spec_kind in DYNAMO_KINDS, "a kind it knows")
        hashes = [*event.hashes, *([] if event.parent is None else [event.parent])]
        if event.kind == "BlockStored":
            _require(len(set(hashes)) == len(hashes), "a block is not its own parent")
        if isinstance(raw, dict):
            event.salt = raw.get("cache_salt")
        for keys in event.extra or ():  # it would take 64 hexadecimal digits for an image's digest
            _require(not keys or all(isinstance(key, str) and len(key) != 64 for key in keys), "")
        events.append(event)
    return events


Key = tuple[str | None, tuple[str, ...], tuple[int, ...]]  # name, extra keys, tokens up to here


class Indexer:
    """Finds blocks by a name and tokens, as llm-d's index does, and knows no versions."""

    def __init__(self, decode: Decode = decode_as_llm_d) -> None:
        self._decode = decode
        self._keys: dict[int, Key] = {}  # of blocks that it was told of with tokens
        self._where: dict[Key, dict[str, set[int]]] = {}  # media, and under which hashes

    def take_in(self, payload: bytes) -> None:
        for event in self._decode(payload):
            if event.kind == "AllBlocksCleared":
                self._keys.clear()
                self._where.clear()
            elif event.kind == "BlockRemoved":
                for block_hash in event.hashes:
                    self._remove(block_hash, event.medium)
            else:
                self._store(event)

    def _store(self, event: Event) -> None:
        size, before = event.block_size, self._keys.get(event.parent or 0, (None, (), ()))
        for index, block_hash in enumerate(event.hashes):
            if event.token_ids:
                extra = event.extra[index] if event.extra else None
                tokens = tuple(event.token_ids[index * size : (index + 1) * size])
                before = event.lora_name, (*before[1], *(extra or ())), (*before[2], *tokens)
                self._keys[block_hash] = before
            if block_hash in self._keys:
                places = self._where.setdefault(self._keys[block_hash], {})
                places.setdefault(event.medium, set()).add(block_hash)

    def _remove(self, block_hash: int, medium: str) -> None:
        key = self._keys.get(block_hash)
        if key is None:
            return
        self._where[key][medium].discard(block_hash)
        if not any(self._where[key].values()):
            del self._where[key], self._keys[block_hash]

    def hashes(self, name: str | None, token_ids: Sequence[int], block_size: int) -> list[set[int]]:
        """The blocks that a prompt of a name is expected to find, from its first on."""
        found: list[set[int]] = []
        for end in range(block_size, len(token_ids) + 1, block_size):
            places = self._where.get((name, (), tuple(token_ids[:end])))
            if not places:
                break
            found.append(set.union(*places.values()))
        return found

    @property
    def num_blocks(self) -> int:
        return len(self._where)


class Subscriber:
    """Reads messages, notices missing numbers, and asks for them again, as llm-d's does.

    loses: whether to lose a message, by its number.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        replay_endpoint: str = "",
        loses: Callable[[int], bool] = lambda number: False,
        topic: str = "kv@",
    ) -> None:
        self._socket = context.socket(zmq.SUB)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.connect(endpoint)
        self._socket.subscribe(topic)
        self._context = context
        self._replay_endpoint = replay_endpoint
        self._loses = loses
        self.indexer = Indexer()
        self.next_number = 0
        self.num_replays = 0
        self.num_restarts = 0
        self.payloads: list[bytes] = []

    def close(self) -> None:
        self._socket.close(0)

    def read(self, seconds: float) -> bool:
        """Take in a message, if one comes in time."""
        if not self._socket.poll(int(seconds * 1e3)):
            return False
        _, head, payload = self._socket.recv_multipart()
        (number,) = struct.unpack(">Q", head)
        if self._loses(number):
            return True
        if number < self.next_number:  # another process counts from 0
            self.num_restarts += 1
            self.next_number = 0
            self.indexer = Indexer()
        if number > self.next_number and self._replay_endpoint:
            self.replay(self.next_number)
        if number >= self.next_number:
            self._take_in(number, payload)
        return True

    def replay(self, first: int) -> None:
        """Take in what is kept from a number on."""
        self.num_replays += 1
        dealer = self._context.socket(zmq.DEALER)
        try:
            dealer.set(zmq.RCVTIMEO, 30_000)
            dealer.connect(self._replay_endpoint)
            dealer.send_multipart([b"", struct.pack(">Q", first)])
            while True:
                delimiter, _, head, payload = dealer.recv_multipart()
                assert delimiter == b""
                if not payload:
                    assert head == b"\xff" * 8, "the end has number -1"
                    return
                self._take_in(struct.unpack(">Q", head)[0], payload)
        finally:
            dealer.close(0)

    def _take_in(self, number: int, payload: bytes) -> None:
        self.payloads.append(payload)
        self.indexer.take_in(payload)
        self.next_number = number + 1
