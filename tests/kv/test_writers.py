from __future__ import annotations

from lora_serve.identity import BlockHash
from lora_serve.kv.writers import PendingWrites


def hashes(*numbers: int) -> list[BlockHash]:
    return [BlockHash(bytes([number])) for number in numbers]


def test_a_waiter_waits_for_the_last_block_that_the_writer_computes() -> None:
    writes: PendingWrites[str] = PendingWrites()
    writes.announce("writer", hashes(1, 2, 3))
    mine = hashes(1, 2, 3, 4)
    assert writes.shared_until(mine, 0, 4) == mine[2]
    assert writes.shared_until(mine, 0, 2) == mine[1]
    assert writes.shared_until(mine, 3, 4) is None
    assert writes.shared_until(mine, 2, 2) is None


def test_waiters_wake_when_their_block_is_written() -> None:
    writes: PendingWrites[str] = PendingWrites()
    writes.announce("writer", hashes(1, 2))
    writes.wait("one", hashes(2)[0])
    writes.wait("two", hashes(2)[0])
    assert writes.written("writer", hashes(1)) == []
    assert writes.num_waiting == 2
    assert writes.written("writer", hashes(2)) == ["one", "two"]
    assert writes.num_waiting == 0
    writes.check_invariants()


def test_waiters_wake_when_the_writer_dies() -> None:
    writes: PendingWrites[str] = PendingWrites()
    writes.announce("writer", hashes(1, 2))
    writes.wait("one", hashes(2)[0])
    assert writes.withdraw("writer") == ["one"]
    assert writes.shared_until(hashes(1, 2), 0, 2) is None
    assert writes.withdraw("writer") == []
    writes.check_invariants()


def test_a_block_stays_with_whoever_announced_it_first() -> None:
    writes: PendingWrites[str] = PendingWrites()
    writes.announce("first", hashes(1))
    writes.announce("second", hashes(1, 2))
    assert writes.written("second", hashes(1)) == []
    assert writes.shared_until(hashes(1), 0, 1) == hashes(1)[0]
    assert writes.withdraw("second") == []
    assert writes.shared_until(hashes(1), 0, 1) == hashes(1)[0]
    writes.check_invariants()


def test_an_aborted_waiter_is_forgotten() -> None:
    writes: PendingWrites[str] = PendingWrites()
    writes.announce("writer", hashes(1))
    writes.wait("one", hashes(1)[0])
    writes.wait("two", hashes(1)[0])
    assert writes.stop_waiting("one")
    assert not writes.stop_waiting("one")
    assert writes.stop_waiting("two")
    assert writes.written("writer", hashes(1)) == []
    writes.check_invariants()
