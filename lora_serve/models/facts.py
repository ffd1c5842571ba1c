"""A spec's facts as text, which enters the model fingerprint and so the identity of stored KV.

The text of a model stays the same from one release to the next, or its stored KV is lost. So a fact
that is added gets a default, which is what models without it compute, and is written only where a
model differs from it. What has a default and was written from the start still is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from lora_serve.layers.rotary import RopeSpec, YarnScaling

# Fields with a default that stand in the fingerprints of KV that is stored already.
_WRITTEN_ANYHOW: Mapping[type, frozenset[str]] = {
    RopeSpec: frozenset({"theta", "scaling"}),
    YarnScaling: frozenset({"beta_fast", "beta_slow", "attention_factor", "truncate"}),
}


def facts_text(value: Any, title: str = "", names: Sequence[str] = ()) -> str:
    """`value` as text, a dataclass by its fields.

    Args:
        value: any value; what is no dataclass is written as its repr.
        title: the text's name for its class; the class's own if left out.
        names: the fields or properties written first, whatever they hold; if left out, the fields
            without a default. Behind them stand the fields that differ from their default.
    """
    if not is_dataclass(value):
        return repr(value)
    anyhow = _WRITTEN_ANYHOW.get(type(value), frozenset())
    first = names or [f.name for f in fields(value) if f.default is MISSING or f.name in anyhow]
    added = [
        f.name
        for f in fields(value)
        if f.name not in first and f.default not in (MISSING, getattr(value, f.name))
    ]
    written = (f"{name}={facts_text(getattr(value, name))}" for name in (*first, *added))
    return f"{title or type(value).__name__}({', '.join(written)})"
