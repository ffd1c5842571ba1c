"""Strategies that harm what is sound: bytes cut, flipped, moved and multiplied; texts of JSON."""

from __future__ import annotations

import json

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

NUMBERS = st.sampled_from(
    [0, 1, 2, 4, 8, 255, 2**15, 2**16 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1]
)


@st.composite
def harmed(draw: st.DrawFn, content: bytes, max_times: int = 4) -> bytes:
    """`content`, with a few places changed, cut out, doubled, or overwritten by a number."""
    data = bytearray(content)
    for _ in range(draw(st.integers(0, max_times))):
        at = draw(st.integers(0, len(data)))
        until = min(len(data), at + draw(st.integers(0, 16)))
        match draw(st.integers(0, 5)):
            case 0:
                data[at:until] = draw(st.binary(max_size=16))
            case 1:
                del data[at:until]
            case 2:
                data[at:at] = data[at:until] * draw(st.integers(1, 50))
            case 3:
                size = draw(st.sampled_from([1, 2, 4, 8]))
                number = draw(NUMBERS) % 2 ** (8 * size)
                data[at : at + size] = number.to_bytes(size, "little")
            case 4:
                data = data[:at]
            case 5 if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
    return bytes(data)


LITERALS = st.sampled_from(
    [
        *("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5000, "-0", "1E400", "0.1e-400"),
        *("null", "true", "{}", "[]", '""', '"\\ud800"', '"\\u0000"', '"\\udfff\\ud800"'),
        *("[" * 3000, "[" * 3000 + "]" * 3000, '{"a":' * 2000 + "1" + "}" * 2000),
        *("[" + ",".join(["1"] * 20000) + "]", '"' + "x" * 200_000 + '"', "2147483648"),
        *('["' + '","'.join(["a"] * 5000) + '"]', "[[1],[2.5],[true]]", "[null]", '[{"a":[]}]'),
    ]
)


@st.composite
def json_texts(draw: st.DrawFn, keys: SearchStrategy[str], values: SearchStrategy[object]) -> bytes:
    """An object as text: keys more than once, and literals that no library would write."""
    parts = []
    for key in draw(st.lists(keys, max_size=5)):
        value = draw(LITERALS) if draw(st.booleans()) else json.dumps(draw(values))
        parts.append(f"{json.dumps(key)}: {value}")
    return ("{" + ", ".join(parts) + "}").encode()
