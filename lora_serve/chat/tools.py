"""What a request's tools are, and the JSON schemas of answers that must call them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Schema = Mapping[str, object]
Mode = Literal["none", "auto", "required", "named"]
NO_ARGUMENTS: Schema = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Tool:
    """One function.

    parameters: a JSON schema of an object, None for no arguments.
    is_strict: a call that is forced must keep to the whole schema, not to what can be enforced.
    """

    name: str
    description: str | None = None
    parameters: Schema | None = None
    is_strict: bool = False

    @property
    def schema(self) -> Schema:
        """The schema of the arguments, which are an object whatever it leaves open."""
        return NO_ARGUMENTS if self.parameters is None else {"type": "object", **self.parameters}

    @property
    def plain(self) -> dict[str, object]:
        """The tool as chat templates know it."""
        function: dict[str, object] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether an answer may call tools, or must.

    name: of the one that it must call. allowed: those that it may call; None for all.
    """

    mode: Mode
    name: str | None = None
    allowed: tuple[str, ...] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The tools that the choice itself names."""
        return self.allowed or (() if self.name is None else (self.name,))

    def permits(self, name: str) -> bool:
        """Whether a call of this tool may be told."""
        return self.mode != "none" and (self.allowed is None or name in self.allowed)


def calls_schema(tools: Sequence[Tool], *, is_parallel: bool) -> Schema:
    """Lists of calls as {"name": …, "parameters": …}: at least one, or one alone."""
    schema: dict[str, object] = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [_call_schema(tool, i) for i, tool in enumerate(tools)]},
    }
    return schema if is_parallel else {**schema, "maxItems": 1}


def _call_schema(tool: Tool, index: int) -> Schema:
    place = f"#/items/anyOf/{index}/properties/parameters"
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.name},
            "parameters": _moved(tool.schema, place),
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: object, place: str) -> object:
    """A schema whose references to itself still hold where it stands at `place` of another."""
    match schema:
        case Mapping():
            return {
                key: _moved_reference(value, place) if key == "$ref" else _moved(value, place)
                for key, value in schema.items()
            }
        case list():
            return [_moved(item, place) for item in schema]
        case _:
            return schema


def _moved_reference(reference: object, place: str) -> object:
    if isinstance(reference, str) and reference.startswith("#"):
        return place + reference[1:]
    return _moved(reference, place)
