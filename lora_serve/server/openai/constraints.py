"""What an answer must match, in the forms that OpenAI's and vLLM's bodies write it in.

As in `fields.py`: a validator raises ValueError with words that follow the field's name. It runs
where the body is parsed, so a large schema holds up no other request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, NotRequired

from pydantic import PlainValidator
from typing_extensions import TypedDict

from lora_serve.errors import InvalidRequestError
from lora_serve.structured_outputs import MAX_TEXT_BYTES, Kind, StructuredOutput

FORMAT_TYPES = ("text", "json_object", "json_schema", "structural_tag")
_KINDS: dict[Kind, tuple[type, ...]] = {
    "json": (str, dict, bool),
    "json_object": (bool,),
    "regex": (str,),
    "choice": (list,),
    "grammar": (str,),
    "structural_tag": (str, dict),
}
# vLLM's further settings, by what they are where they ask for nothing.
_NEUTRAL = {
    "disable_any_whitespace": (None, False),
    "disable_additional_properties": (None, False),
    "disable_fallback": (None, False, True),
    "whitespace_pattern": (None,),
}
_TYPE_NAMES = {str: "a string", dict: "an object", bool: "true or false", list: "a list of strings"}


def parse_response_format(value: object) -> StructuredOutput | None:
    """OpenAI's: {"type": "json_schema", "json_schema": {"schema": …, "strict": …}} and others."""
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in FORMAT_TYPES:
        raise ValueError(f"must be an object whose `type` is one of {', '.join(FORMAT_TYPES)}")
    assert isinstance(value, dict), "what has a type is an object"
    if kind == "structural_tag":
        return _constraint({"structural_tag": value})
    schema_fields = {"json_schema"} if kind == "json_schema" else set()
    _refuse_unknown(value, {"type", *schema_fields})
    if kind == "json_schema":
        return named_schema(
            value.get("json_schema"), "an object `json_schema` with an object `schema` in it"
        )
    return None if kind == "text" else _constraint({"json_object": True})


def named_schema(value: object, needed: str) -> StructuredOutput:
    """{"name": …, "schema": …, "strict": …}. needed: what else there must be, for the error."""
    schema = value.get("schema") if isinstance(value, dict) else None
    if not isinstance(schema, dict):
        raise ValueError(f"must have {needed}")
    assert isinstance(value, dict), "what has a schema is an object"
    _refuse_unknown(value, {"schema", "strict", "name", "description"})
    strict = value.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise ValueError("must have true or false as `strict`")
    constraint = _constraint({"json": schema})
    return StructuredOutput(constraint.kind, constraint.text, is_strict=bool(strict))


def parse_structured_outputs(value: object) -> StructuredOutput | None:
    """vLLM's: one of json, json_object, regex, choice, grammar and structural_tag."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError(f"must be an object with one of {', '.join(_KINDS)}")
    _refuse_unknown(value, {*_KINDS, *_NEUTRAL})
    for name, neutral in _NEUTRAL.items():
        if value.get(name) not in neutral:
            raise ValueError(f"has {name}, which is not supported by this server; leave it out")
    return _constraint({kind: value[kind] for kind in _KINDS if value.get(kind) is not None})


def guided(kind: Kind) -> Callable[[object], StructuredOutput | None]:
    """Parser of vLLM's older guided_json and its like."""

    def parse(value: object) -> StructuredOutput | None:
        return None if value is None else _constraint({kind: value})

    return parse


def _constraint(given: Mapping[Kind, object]) -> StructuredOutput:
    for kind, value in given.items():
        if not isinstance(value, _KINDS[kind]):
            names = " or ".join(_TYPE_NAMES[each] for each in _KINDS[kind])
            raise ValueError(f"must have {names} as its {kind}")
        if isinstance(value, list) and not all(isinstance(each, str) for each in value):
            raise ValueError("must have a list of strings as its choice")
        if isinstance(value, str) and len(value) > MAX_TEXT_BYTES:  # not to be parsed first
            raise ValueError(
                f"has a {kind} of {len(value)} characters, at most {MAX_TEXT_BYTES} bytes are "
                "allowed; shorten it"
            )
    try:
        constraint = StructuredOutput.of(**dict(given))  # type: ignore[arg-type]
        constraint.verify()
    except InvalidRequestError as error:
        raise ValueError(str(error).removeprefix("structured_outputs").lstrip(": ")) from None
    return constraint


def _refuse_unknown(value: Mapping[str, object], known: set[str]) -> None:
    if unknown := sorted(value.keys() - known):
        raise ValueError(f"has unknown fields {unknown[:5]}; known are {sorted(known)}")


class _JsonSchema(TypedDict):
    schema: dict[str, object]
    name: NotRequired[str | None]
    description: NotRequired[str | None]
    strict: NotRequired[bool | None]


class _ResponseFormat(TypedDict):
    type: str
    json_schema: NotRequired[_JsonSchema]
    format: NotRequired[dict[str, object]]
    structures: NotRequired[list[dict[str, object]]]
    triggers: NotRequired[list[str]]


class _StructuredOutputs(TypedDict, total=False):
    json: str | dict[str, object] | bool | None
    json_object: bool | None
    regex: str | None
    choice: list[str] | None
    grammar: str | None
    structural_tag: str | dict[str, object] | None


_Constraint = StructuredOutput | None
ResponseFormat = Annotated[
    _Constraint, PlainValidator(parse_response_format, _ResponseFormat | None)
]
StructuredOutputs = Annotated[
    _Constraint, PlainValidator(parse_structured_outputs, _StructuredOutputs | None)
]
GuidedJson = Annotated[
    _Constraint, PlainValidator(guided("json"), str | dict[str, object] | bool | None)
]
GuidedRegex = Annotated[_Constraint, PlainValidator(guided("regex"), str | None)]
GuidedChoice = Annotated[_Constraint, PlainValidator(guided("choice"), list[str] | None)]
GuidedGrammar = Annotated[_Constraint, PlainValidator(guided("grammar"), str | None)]
