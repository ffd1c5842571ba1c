from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

import numpy as np

from lora_serve.adapter_checkpoint import RawTensor, num_tensor_bytes, tensors_of
from tests.fakes.checkpoints import whole_checkpoint

WHOLE = whole_checkpoint()


def all_fields(value: object) -> Iterator[tuple[Field[Any], object]]:
    """The fields of an adapter and of all its parts, with what each holds."""
    if isinstance(value, tuple):
        for part in value:
            yield from all_fields(part)
    elif is_dataclass(value):
        for field in fields(value):
            held = getattr(value, field.name)
            yield field, held
            yield from all_fields(held)


def test_the_adapter_that_tests_take_for_a_whole_one_has_all_that_any_may_have() -> None:
    for field, held in all_fields(WHOLE):
        assert held not in (MISSING, None, ()), f"fill {field.name} in tests/fakes/checkpoints.py"


def test_tensors_are_found_in_whatever_field_they_are() -> None:
    assert WHOLE.tensor_fields == ("modules", "token_rows", "biases")
    data = [bytes(tensor.data) for tensor in tensors_of(WHOLE)]
    assert b"".join(data) == bytes(range(128))
    assert num_tensor_bytes(WHOLE) == 128


def test_without_its_tensors_an_adapter_is_the_same_otherwise() -> None:
    bare = WHOLE.without_tensors()
    assert not list(tensors_of(bare))
    for field in fields(WHOLE):
        if field.name not in WHOLE.tensor_fields:
            assert getattr(bare, field.name) == getattr(WHOLE, field.name)


def address(data: memoryview) -> int:
    return np.frombuffer(data, np.uint8).ctypes.data


def test_tensors_are_pickled_from_where_they_lie() -> None:
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(WHOLE, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    assert list(map(address, views)) == [address(tensor.data) for tensor in tensors_of(WHOLE)]
    read = pickle.loads(head, buffers=views)
    assert read == WHOLE
    assert all(isinstance(tensor.data, memoryview) for tensor in tensors_of(read))
    assert isinstance(read.modules[0].a, RawTensor)
