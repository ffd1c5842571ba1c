from __future__ import annotations

import numpy as np

from lora_serve.kv_tiers.read_buffers import SMALL_BYTES, ReadBuffers


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_memory_is_used_again_when_no_slice_of_it_is_left() -> None:
    buffers = ReadBuffers(4 * SMALL_BYTES, num_kept=1)
    view = buffers.take(2 * SMALL_BYTES)
    first = address(view)
    part = view[100:200].toreadonly()
    del view
    other = buffers.take(SMALL_BYTES)
    assert address(other) != first
    del part
    again = buffers.take(3 * SMALL_BYTES)
    assert len(again) == 3 * SMALL_BYTES
    assert address(again) == first


def test_what_is_looked_at_is_never_overwritten() -> None:
    buffers = ReadBuffers(2 * SMALL_BYTES, num_kept=4)
    views = []
    for i in range(6):
        view = buffers.take(SMALL_BYTES)
        view[:] = bytes([i]) * SMALL_BYTES
        views.append(view[5:10])
        if i % 2:
            del views[0]
    assert [bytes(view) for view in views] == [bytes([i]) * 5 for i in (3, 4, 5)]


def test_sizes_beyond_a_buffer_get_memory_of_their_own() -> None:
    buffers = ReadBuffers(2 * SMALL_BYTES, num_kept=4)
    assert len(buffers.take(10)) == 10
    assert len(buffers.take(3 * SMALL_BYTES)) == 3 * SMALL_BYTES
    assert len(buffers.take(0)) == 0
