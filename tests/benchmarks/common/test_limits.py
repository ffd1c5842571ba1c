from __future__ import annotations

import threading
import time

from benchmarks.common.busy import busy_cores
from benchmarks.common.limits import best_seconds, layer_weights, vocabulary_weights
from benchmarks.common.make_checkpoint import QWEN_0_5B


def test_the_shortest_turn_counts() -> None:
    turns = iter([0.0, 0.03, 0.01, 0.03, 0.03])
    shortest = best_seconds(lambda: time.sleep(next(turns)), patience_seconds=0.0)
    assert 0.01 <= shortest < 0.03


def test_what_another_thread_burns_is_seen() -> None:
    stop = threading.Event()

    def burn() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=burn)
    thread.start()
    before = time.process_time()
    busy = busy_cores(0.5)
    burnt = (time.process_time() - before) / 0.5
    stop.set()
    thread.join()
    assert busy > 0.7 * burnt > 0


def test_weights_are_counted_as_the_checkpoint_has_them() -> None:
    assert layer_weights(QWEN_0_5B) == 357_826_560
    assert vocabulary_weights(QWEN_0_5B) == 136_134_656
