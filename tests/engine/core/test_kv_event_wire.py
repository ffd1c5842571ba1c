from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lora_serve.engine.core.kv_event_wire import EventEncoder
from lora_serve.identity import BlockHash
from lora_serve.kv.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    Medium,
    Namespace,
)
from lora_serve.kv_groups import KVGroup
from tests.fakes.kv_event_consumers import Decode, decode_as_dynamo, decode_as_llm_d

ONE, TWO, THREE = (BlockHash(bytes([i] * 32)) for i in (1, 2, 255))
NUMBERS = [int.from_bytes(h[-8:], "big") for h in (ONE, TWO, THREE)]
SALTED = Namespace("tenant", 7, "salt:abc")


def written(event: KVEvent, encoding: str, groups: tuple[KVGroup, ...] = (KVGroup(),)) -> Any:
    payload = EventEncoder(encoding, 2, groups).encode(1.5, [event])
    timestamp, (only,), rank = msgspec.msgpack.decode(payload)
    assert (timestamp, rank) == (1.5, 0)
    return only


def stored(namespace: Namespace = SALTED, **changes: Any) -> BlockStored:
    tokens, embeds = [5, 6, 0, 0], ["", "embeds:e"]
    event = BlockStored(Medium.GPU, 0, namespace, None, [ONE, THREE], tokens, embeds)
    for name, value in changes.items():
        setattr(event, name, value)
    return event


def test_a_stored_block_as_a_map() -> None:
    assert written(stored(), "map") == {
        "type": "BlockStored",
        "block_hashes": [NUMBERS[0], NUMBERS[2]],
        "parent_block_hash": None,
        "token_ids": [5, 6, 0, 0],
        "block_size": 2,
        "lora_id": 7,
        "medium": "GPU",
        "lora_name": "tenant",
        "extra_keys": [["salt:abc"], ["embeds:e"]],
        "cache_salt": "salt:abc",
    }


def test_the_salt_is_the_key_of_a_chains_first_block_alone() -> None:
    event = written(stored(parent=TWO, embeds=["", ""]), "map")
    assert "extra_keys" not in event
    assert (event["cache_salt"], event["parent_block_hash"]) == ("salt:abc", NUMBERS[1])


def test_a_stored_block_as_an_array_ends_with_the_last_value() -> None:
    plain = stored(Namespace(), embeds=["", ""])
    assert written(plain, "array")[5:] == [None, "GPU", None]
    assert written(stored(), "array")[5:] == [7, "GPU", "tenant", [["salt:abc"], ["embeds:e"]]]


@pytest.mark.parametrize("encoding", ["map", "array"])
def test_groups_are_told_where_layers_see_windows(encoding: str) -> None:
    groups = (KVGroup(), KVGroup(64))
    event = written(stored(group=1), encoding, groups)
    values = list(event.values())[:-1] if encoding == "map" else event
    assert values[-3:] == [1, "sliding_window", 64]
    full = written(stored(group=0), encoding, groups)
    assert (full["group_idx"] if encoding == "map" else full[9]) == 0
    removed = written(BlockRemoved(Medium.CPU, 1, [TWO]), encoding, groups)
    assert (list(removed.values()) if encoding == "map" else removed) == [
        "BlockRemoved",
        [NUMBERS[1]],
        "CPU",
        1,
    ]


def test_what_is_removed_and_cleared() -> None:
    removed = BlockRemoved(Medium.STORAGE, 0, [ONE])
    assert written(removed, "array") == ["BlockRemoved", [NUMBERS[0]], "STORAGE"]
    assert written(AllBlocksCleared(), "map") == {"type": "AllBlocksCleared"}
    assert written(AllBlocksCleared(), "array") == ["AllBlocksCleared"]


@pytest.mark.parametrize("groups", [(KVGroup(),), (KVGroup(), KVGroup(64))])
@pytest.mark.parametrize("encoding", ["map", "array"])
@pytest.mark.parametrize("decode", [decode_as_llm_d, decode_as_dynamo])
def test_consumers_read_what_was_meant(
    decode: Decode, encoding: str, groups: tuple[KVGroup, ...]
) -> None:
    events: list[KVEvent] = [
        AllBlocksCleared(),
        stored(),
        BlockStored(Medium.STORAGE, 0, Namespace("tenant", 7), None, [ONE, THREE]),
        BlockRemoved(Medium.GPU, 0, [THREE, ONE]),
    ]
    payload = EventEncoder(encoding, 2, groups).encode(1.0, events)
    cleared, device, tier, removed = decode(payload)
    assert cleared.kind == "AllBlocksCleared"
    assert (device.kind, device.medium, device.lora_name) == ("BlockStored", "GPU", "tenant")
    assert device.hashes == tier.hashes == [NUMBERS[0], NUMBERS[2]]
    assert (device.token_ids, tier.token_ids) == ([5, 6, 0, 0], [])
    assert (tier.medium, removed.medium) == ("STORAGE", "GPU")
    assert removed.hashes == [NUMBERS[2], NUMBERS[0]]
    assert device.group == removed.group == (None if len(groups) == 1 else 0)
