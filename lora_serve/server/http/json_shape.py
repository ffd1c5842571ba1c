"""Counts what a JSON text is made of before it is parsed, and refuses what no request needs.

The parser makes an object of each value, and lets no other thread run meanwhile: 4 MiB of `[],` are
1.4 million lists and over a second in which no client is answered (pydantic-core 2.46, Zen 5). To
count costs a few passes over the bytes.
"""

from __future__ import annotations

from lora_serve.errors import InvalidRequestError

MAX_STRINGS = 2**16  # keys of objects are strings too
MAX_CONTAINERS = 2**15
MAX_ITEMS = 2**20  # token ids of prompts, above all
FEW_CONTAINERS = 1024


def has_few_containers(data: bytes) -> bool:
    """Whether so few lists and objects can be in it that it is parsed at once."""
    return data.count(b"[") + data.count(b"{") <= FEW_CONTAINERS


def check_shape(data: bytes) -> None:
    """Refuse a body of more values than it takes long to parse.

    Raises:
        InvalidRequestError: naming what there is too much of.
    """
    found = excess(data)
    if found is not None:
        raise InvalidRequestError(f"the body holds {found}; send several requests")


def excess(data: bytes) -> str | None:
    """What JSON holds too much of, and how much is allowed; None if nothing.

    Of what is not JSON at least all that precedes the fault is counted, as the parser goes.
    """
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_strings = plain.count(b'"') // 2
    if num_strings > MAX_STRINGS:
        return f"{num_strings} strings, at most {MAX_STRINGS} are allowed"
    outside = b"".join(plain.split(b'"')[::2])
    num_containers = outside.count(b"[") + outside.count(b"{")
    if num_containers > MAX_CONTAINERS:
        return f"{num_containers} lists and objects, at most {MAX_CONTAINERS} are allowed"
    num_values = outside.count(b",")
    if num_values > MAX_ITEMS:
        return f"{num_values} values, at most {MAX_ITEMS} are allowed"
    return None
