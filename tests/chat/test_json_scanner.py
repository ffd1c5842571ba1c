from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from lora_serve.chat.json_scanner import JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)  # fmt: skip


@given(value=VALUES, indent=st.sampled_from([None, 1]), is_ascii=st.booleans())
def test_a_value_ends_where_json_says_so(value: object, indent: int, is_ascii: bool) -> None:
    text = json.dumps([value], indent=indent, ensure_ascii=is_ascii)
    scanner = JsonScanner()
    assert scanner.feed(text + "]x", 0) == len(text)
    assert scanner.is_complete
    assert not scanner.is_broken


@given(rest=st.text('{}[],:"\\/0123.eE+-truefalsn u\n\x01', max_size=12))
def test_it_takes_what_json_takes(rest: str) -> None:
    text = "[" + rest
    scanner = JsonScanner()
    end = scanner.feed(text, 0)
    try:
        _, expected = json.JSONDecoder().raw_decode(text)
    except ValueError:
        assert not scanner.is_complete
    else:
        assert scanner.is_complete
        assert end == expected


def test_a_number_ends_with_what_follows_it() -> None:
    scanner = JsonScanner()
    assert scanner.feed("12", 0) == 2
    assert not scanner.is_complete
    assert scanner.feed("3 ", 0) == 1
    assert scanner.is_complete
