from __future__ import annotations

import json
import random
import re

import pytest

from lora_serve.errors import InvalidRequestError
from lora_serve.server.http import json_shape
from lora_serve.server.http.json_shape import (
    MAX_CONTAINERS,
    MAX_ITEMS,
    MAX_STRINGS,
    JsonTally,
    check_shape,
)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[]] * MAX_CONTAINERS, f"{MAX_CONTAINERS + 1} lists and objects"),
        ([{}] * MAX_CONTAINERS, f"{MAX_CONTAINERS + 1} lists and objects"),
        ([""] * (MAX_STRINGS + 1), f"{MAX_STRINGS + 1} strings"),
        (dict.fromkeys(range(MAX_STRINGS + 1), 1), f"{MAX_STRINGS + 1} strings"),
        ([1] * (MAX_ITEMS + 2), f"{MAX_ITEMS + 1} values"),
        (["\\", '"[', *([[]] * MAX_CONTAINERS)], f"{MAX_CONTAINERS + 1} lists and objects"),
    ],
)
def test_more_values_than_any_request_needs_are_refused(value: object, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(message)):
        check_shape(json.dumps(value).encode())


@pytest.mark.parametrize(
    "value",
    [
        "[{," * MAX_ITEMS,
        '\\"[{,' * MAX_ITEMS,
        [1] * MAX_ITEMS,
        [""] * MAX_STRINGS,
        [[]] * (MAX_CONTAINERS - 1),
    ],
)
def test_what_stands_in_strings_is_not_counted(value: object) -> None:
    check_shape(json.dumps(value).encode())


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_counted_as_the_whole_is(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    draw = random.Random(seed)
    values = ["\\" * 5, '"[,', '\\"', [[]], {"\\": [1, 2]}, "x" * 9]
    data = json.dumps([draw.choice(values) for _ in range(60)]).encode()
    told = []
    for size in (2**20, 1, 2, 7, 64):
        monkeypatch.setattr(json_shape, "PIECE_BYTES", size)
        tally = JsonTally()
        assert tally.add(data) is None
        told.append(tuple(vars(tally).values()))
    parsed = json.loads(data)
    assert told == [told[0]] * 5
    assert told[0][0] == sum(_num_strings(each) for each in parsed)


def _num_strings(value: object) -> int:
    if isinstance(value, dict):
        return sum(1 + _num_strings(each) for each in value.values())
    if isinstance(value, list):
        return sum(map(_num_strings, value))
    return isinstance(value, str)


def test_what_follows_a_broken_string_hides_nothing_before_it() -> None:
    data = b"[" + b"[]," * (MAX_CONTAINERS + 1) + rb"\""
    with pytest.raises(InvalidRequestError):
        check_shape(data)
