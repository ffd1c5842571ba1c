"""Structural tags as vLLM's bodies write them: free text with parts that match schemas."""

from __future__ import annotations

from typing import Any

import msgspec

from lora_serve.structured_output.backend import refusal


class Structure(msgspec.Struct, frozen=True):
    begin: str
    end: str
    schema: dict[str, Any] | bool = msgspec.field(default_factory=dict)

    def trigger(self, triggers: list[str]) -> str:
        """The first trigger that it begins with.

        Raises:
            InvalidRequestError: there is none.
        """
        for trigger in triggers:
            if trigger and self.begin.startswith(trigger):
                return trigger
        raise refusal(f"begin {self.begin[:80]!r} starts with none of the triggers")


class StructuralTag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    structures: list[Structure]
    triggers: list[str]
    type: str = "structural_tag"


def parse_structural_tag(text: str) -> StructuralTag:
    """The tag that a constraint's text holds.

    Raises:
        InvalidRequestError: it holds none, or a structure that nothing triggers.
    """
    try:
        given = msgspec.json.decode(text, type=StructuralTag)
    except msgspec.DecodeError as error:
        raise refusal(f"the structural tag is not as it must be: {error}") from error
    for structure in given.structures:
        structure.trigger(given.triggers)
    return given
