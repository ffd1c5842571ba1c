from __future__ import annotations

import gc
import weakref

import pytest

from lora_serve.quiet_imports import without_collections


class Node:
    pass


def cycle() -> weakref.ref[Node]:
    node = Node()
    node.me = node
    return weakref.ref(node)


def test_nothing_is_collected_until_it_is_asked_for() -> None:
    collections: list[str] = []
    note = lambda phase, _: collections.append(phase)  # noqa: E731
    gc.callbacks.append(note)
    try:
        with without_collections():
            made = cycle()
            kept = [Node() for _ in range(100_000)]
    finally:
        gc.callbacks.remove(note)
    assert not collections
    assert len(kept) == 100_000
    gc.collect()
    assert made() is not None, "it was frozen, so that later collections do not walk over it"
    gc.unfreeze()
    gc.collect()
    assert made() is None


def test_the_collector_is_as_it_was_after_an_import_that_fails() -> None:
    with pytest.raises(ImportError), without_collections():
        import lora_serve.no_such_module  # noqa: F401
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
