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
    """Refuse JSON of more values than it takes long to parse.

    Of what is not JSON at least all that precedes the fault is counted, as the parser goes.

    Raises:
        InvalidRequestError: naming what there is too much of.
    """
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    _require_at_most(MAX_STRINGS, plain.count(b'"') // 2, "strings")
    outside = b"".join(plain.split(b'"')[::2])
    num_containers = outside.count(b"[") + outside.count(b"{")
    _require_at_most(MAX_CONTAINERS, num_containers, "lists and objects")
    _require_at_most(MAX_ITEMS, outside.count(b","), "values")


def _require_at_most(limit: int, count: int, what: str) -> None:
    if count > limit:
        raise InvalidRequestError(
            f"the body holds {count} {what}, at most {limit} are allowed; send several requests"
        )
