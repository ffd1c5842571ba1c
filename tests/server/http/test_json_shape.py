from __future__ import annotations

import json
import re

import pytest

from lora_serve.errors import InvalidRequestError
from lora_serve.server.http.json_shape import MAX_CONTAINERS, MAX_ITEMS, MAX_STRINGS, check_shape


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


def test_what_follows_a_broken_string_hides_nothing_before_it() -> None:
    data = b"[" + b"[]," * (MAX_CONTAINERS + 1) + rb"\""
    with pytest.raises(InvalidRequestError):
        check_shape(data)
