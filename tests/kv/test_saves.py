from __future__ import annotations

from array import array

from lora_serve.identity import EVERYTHING, BlockHash
from lora_serve.kv.block_table import BlockTable
from lora_serve.kv.saves import PendingSaves
from lora_serve.kv_tiers.base import TierNamespace

HASHES = [BlockHash(bytes([index])) for index in range(8)]
TABLES = [BlockTable(array("i", range(100, 108)))]


def namespace(lora_name: str = "") -> TierNamespace:
    return TierNamespace(lora_name.encode(), b"m", lora_name, b"", 0, b"", b"l", 1)


def gathered(saves: PendingSaves, *blobs: bytes) -> list[tuple[str, list[int]]]:
    """Whose blocks, and which: blob i is that of block i."""
    found = []
    for run, blocks in saves.gathered(blobs):
        assert all(data == b"of " + block_hash for block_hash, data in blocks)
        found.append((run.namespace.lora_name, [block_hash[0] for block_hash, _ in blocks]))
    return found


def blob(index: int) -> bytes:
    return b"of " + HASHES[index]


def test_blocks_are_handed_over_in_runs_of_one_chain() -> None:
    saves = PendingSaves()
    saves.add(namespace(), HASHES, TABLES, [0, 1, 3, 4, 5, 7])
    saves.add(namespace("a"), HASHES, TABLES, range(2))
    saves.add(namespace(), HASHES, TABLES, [])
    assert saves.plan() == (100, 101, 103, 104, 105, 107, 100, 101)
    blobs = [blob(index) for index in (0, 1, 3, 4, 5, 7, 0, 1)]
    assert gathered(saves, *blobs) == [("", [0, 1]), ("", [3, 4, 5]), ("", [7]), ("a", [0, 1])]
    assert saves.plan() == ()
    assert gathered(saves) == []


def test_a_step_may_be_planned_before_the_one_before_it_has_run() -> None:
    saves = PendingSaves()
    saves.add(namespace(), HASHES, TABLES, [0])
    assert saves.plan() == (100,)
    saves.add(namespace(), HASHES, TABLES, [5])
    assert saves.plan() == (105,)
    assert gathered(saves, blob(0)) == [("", [0])]
    assert gathered(saves, blob(5)) == [("", [5])]


def test_what_is_forgotten_is_neither_planned_nor_handed_over() -> None:
    saves = PendingSaves()
    for name in ("a", "b"):
        saves.add(namespace(name), HASHES, TABLES, [0])
    saves.plan()
    for name in ("a", "b"):
        saves.add(namespace(name), HASHES, TABLES, [1])
    saves.forget("a")
    assert gathered(saves, blob(0), blob(0)) == [("b", [0])]
    assert saves.plan() == (101,)
    saves.forget(EVERYTHING)
    assert gathered(saves, blob(1)) == []
