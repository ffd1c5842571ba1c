from __future__ import annotations

import pytest

from lora_serve.adapters.strict_json import parse_object


def test_an_object_is_returned() -> None:
    findings: list[str] = []
    assert parse_object(b'{"a": {"b": [1, "\xc3\xa9"]}}', "it", findings) == {"a": {"b": [1, "é"]}}
    assert not findings


@pytest.mark.parametrize(
    ("data", "finding"),
    [
        (b"{", "it is not valid JSON: Expecting property name"),
        (b'{"a": 1, "a": 1}', "it is not valid JSON: a key stands there twice"),
        (b'{"x": {"a": 1, "a": 2}}', "it is not valid JSON: a key stands there twice"),
        (b"\x80", "it is not valid JSON: byte 0 is no UTF-8"),
        (b'{"a":' * 100_000, "it is not valid JSON: maximum recursion depth"),
        (b'{"a": ' + b"1" * 5000 + b"}", "it is not valid JSON: Exceeds the limit"),
        (b"[1]", "it holds a list, not a JSON object"),
    ],
)
def test_anything_else_is_one_finding(data: bytes, finding: str) -> None:
    findings: list[str] = []
    assert parse_object(data, "it", findings) is None
    assert len(findings) == 1
    assert findings[0].startswith(finding)
