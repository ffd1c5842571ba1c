"""Structural tags: free text with parts that match schemas, as vLLM's bodies write them.

There are two notations, xgrammar's tree of formats and the older list of structures; both are read
as formats here. Knows no library.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, Union

import msgspec

from lora_serve.structured_output.backend import refusal

NOT_EMPTY = msgspec.Meta(min_length=1)
# What xgrammar's own classes write, though it is not asked for; nothing else of it is offered.
INERT_FIELDS = ("style", "any_order", "max_whitespace_cnt", "excludes", "max_tokens", "max_chars")
_INERT: tuple[object, ...] = ("json", False, None, [])


class _Format(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    def __post_init__(self) -> None:
        for name in INERT_FIELDS:
            if (value := getattr(self, name, None)) not in _INERT:
                raise ValueError(f"{name} {str(value)[:80]} is not supported; leave it out")


class ConstString(_Format, frozen=True, tag="const_string"):
    value: str


class JSONSchema(_Format, frozen=True, tag="json_schema"):
    json_schema: dict[str, Any] | bool
    style: Any = None
    any_order: Any = None
    max_whitespace_cnt: Any = None
    excludes: Any = None


class Regex(_Format, frozen=True, tag="regex"):
    pattern: str


class AnyText(_Format, frozen=True, tag="any_text"):
    excludes: Any = None
    max_tokens: Any = None
    max_chars: Any = None


class AllOf(_Format, frozen=True, tag="sequence"):
    elements: list[Format]


class OneOf(_Format, frozen=True, tag="or"):
    elements: Annotated[list[Format], NOT_EMPTY]


class Optional(_Format, frozen=True, tag="optional"):
    content: Format


class Star(_Format, frozen=True, tag="star"):
    content: Format


class Plus(_Format, frozen=True, tag="plus"):
    content: Format


class Tag(_Format, frozen=True, tag="tag"):
    """A part of its own. end: the texts of which one ends it."""

    begin: str
    content: Format
    end: str | Annotated[list[str], NOT_EMPTY]

    @property
    def ends(self) -> list[str]:
        return [self.end] if isinstance(self.end, str) else self.end


class TriggeredTags(_Format, frozen=True, tag="triggered_tags"):
    """Free text, in which a trigger is the beginning of a tag."""

    triggers: list[str]
    tags: Annotated[list[Tag], NOT_EMPTY]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: Any = None

    def trigger_of(self, tag: Tag) -> str:
        """The first trigger that it begins with.

        Raises:
            InvalidRequestError: there is none.
        """
        for trigger in self.triggers:
            if trigger and tag.begin.startswith(trigger):
                return trigger
        raise refusal(f"begin {tag.begin[:80]!r} starts with none of the triggers")


class TagsWithSeparator(_Format, frozen=True, tag="tags_with_separator"):
    tags: Annotated[list[Tag], NOT_EMPTY]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format: TypeAlias = Union[  # noqa: UP007 (of classes that name it before it is there)
    ConstString,
    JSONSchema,
    Regex,
    AnyText,
    AllOf,
    OneOf,
    Optional,
    Star,
    Plus,
    Tag,
    TriggeredTags,
    TagsWithSeparator,
]


class _OfFormats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: Format
    type: str = "structural_tag"


class _Structure(msgspec.Struct, frozen=True):
    begin: str
    end: str
    schema: dict[str, Any] | bool = msgspec.field(default_factory=dict)

    @property
    def tag(self) -> Tag:
        return Tag(self.begin, JSONSchema(self.schema), self.end)


class _OfStructures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    structures: Annotated[list[_Structure], NOT_EMPTY]
    triggers: list[str]
    type: str = "structural_tag"

    @property
    def format(self) -> TriggeredTags:
        return TriggeredTags(self.triggers, [structure.tag for structure in self.structures])


def parse_structural_tag(text: str) -> Format:
    """The format that a constraint's text holds.

    Raises:
        InvalidRequestError: it holds none.
    """
    try:
        given = msgspec.json.decode(text)
        if isinstance(given, dict) and "format" in given:
            return msgspec.convert(given, _OfFormats).format
        return msgspec.convert(given, _OfStructures).format
    except (msgspec.MsgspecError, RecursionError) as error:
        raise refusal(f"the structural tag is not as it must be: {error}") from error
