from __future__ import annotations

import threading
import time

from lora_serve.kv_tiers.save_queue import Batch, SaveQueue
from tests.fakes.kv_blocks import a_namespace

A, B = a_namespace("a"), a_namespace("b")


def test_small_saves_of_a_namespace_become_one_batch() -> None:
    queue: SaveQueue[str] = SaveQueue(100, 4, 60.0)
    assert queue.put(B, ["b"], 1)
    for item in "wxyz":
        assert queue.take(0.0) is None
        assert queue.put(A, [item], 1)
    batch = queue.take(0.0)
    assert isinstance(batch, Batch)
    assert (batch.namespace, batch.items) == (A, ["w", "x", "y", "z"])


def test_a_batch_does_not_wait_for_more_than_its_time() -> None:
    queue: SaveQueue[str] = SaveQueue(100, 50, 0.05)
    queue.put(A, ["x"], 1)
    start = time.monotonic()
    assert isinstance(queue.take(5.0), Batch)
    assert time.monotonic() - start >= 0.04


def test_an_urgent_batch_waits_for_nothing() -> None:
    queue: SaveQueue[str] = SaveQueue(100, 50, 60.0)
    queue.put(A, ["x"], 1)
    assert queue.take(0.0) is None
    queue.put(A, ["y"], 1, is_urgent=True)
    queue.put(B, ["z"], 1)
    batch = queue.take(0.0)
    assert isinstance(batch, Batch)
    assert batch.items == ["x", "y"]
    queue.done()
    assert queue.take(0.0) is None


def test_what_finds_no_room_is_refused_whole() -> None:
    queue: SaveQueue[str] = SaveQueue(10, 4, 0.0)
    assert queue.put(A, ["x"], 6)
    assert not queue.put(B, ["y"], 5)
    queue.take(0.0)
    assert not queue.put(B, ["y"], 5)  # what is being saved still takes room
    queue.done()
    assert queue.put(B, ["y"], 5)


def test_a_task_comes_first_and_discards_what_it_would_undo() -> None:
    queue: SaveQueue[str] = SaveQueue(10, 1, 0.0)
    queue.put(A, ["x"], 6)
    queue.put(B, ["y"], 4)

    def task() -> None: ...

    queue.put_task(task, lambda namespace: namespace == A)
    assert queue.take(0.0) is task
    queue.done()
    assert queue.put(A, ["z"], 6)
    left = queue.take(0.0)
    assert isinstance(left, Batch)
    assert left.namespace == B


def test_waiting_until_idle_gives_out_what_lingers() -> None:
    queue: SaveQueue[str] = SaveQueue(100, 50, 60.0)
    queue.put(A, ["x"], 1)
    taken: list[object] = []

    def work() -> None:
        taken.append(queue.take(10.0))
        queue.done()

    worker = threading.Thread(target=work)
    worker.start()
    assert queue.wait_idle(5.0)
    worker.join()
    assert isinstance(taken[0], Batch)


def test_waiting_until_idle_gives_up_in_time() -> None:
    queue: SaveQueue[str] = SaveQueue(100, 1, 0.0)
    queue.put(A, ["x"], 1)
    assert not queue.wait_idle(0.02)


def test_a_closed_queue_takes_and_gives_nothing() -> None:
    queue: SaveQueue[str] = SaveQueue(100, 1, 0.0)
    queue.put(A, ["x"], 1)
    queue.close()
    assert not queue.put(A, ["x"], 1)
    assert queue.take(10.0) is None
