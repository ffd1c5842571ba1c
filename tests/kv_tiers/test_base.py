from __future__ import annotations

from lora_serve.kv_tiers.base import Drop
from tests.fakes.kv_blocks import a_namespace


def test_a_drop_takes_an_adapters_versions_but_the_one_to_keep_or_everything() -> None:
    old, new, other = spaces = [a_namespace("n", "A"), a_namespace("n", "B"), a_namespace("m")]
    spaces.append(a_namespace("n", "A", model=b"another"))
    for drop, taken in (
        (Drop(b"model", "n"), [old, new]),
        (Drop(b"model", "n", keep=(new.digest, 0)), [old]),
        (Drop(b"model", "n", keep=(new.digest, 1)), [old, new]),
        (Drop(b"model", ""), []),
        (Drop(b"model"), [old, new, other]),
    ):
        assert [space for space in spaces if drop.takes(space)] == taken
