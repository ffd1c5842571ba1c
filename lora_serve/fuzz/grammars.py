"""The grammars that traces hold answers to."""

from __future__ import annotations

from lora_serve.structured_outputs import StructuredOutput

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CONSTRAINTS = (
    StructuredOutput.of(json=PERSON),
    StructuredOutput.of(json={"type": "array", "items": {"enum": ["a", "bb", 3]}, "maxItems": 9}),
    StructuredOutput.of(json_object=True),
    StructuredOutput.of(regex="[a-c]{1,40}(ab|ba)?"),
    StructuredOutput.of(regex="(the |of |and ){2,90}end"),
    StructuredOutput.of(choice=("yes", "no", "year after year")),
    StructuredOutput.of(grammar='root ::= "x" [0-9]+ ("." root)?'),
)
_PERSON_TAG = {
    "type": "tag",
    "begin": "<a>",
    "content": {"type": "json_schema", "json_schema": PERSON},
    "end": "</a>",
}
_WORD_TAG = {
    "type": "tag",
    "begin": "<b>",
    "content": {"type": "regex", "pattern": "(the |of |and ){1,9}end"},
    "end": ["!", "?"],
}
_FORMATS: tuple[dict[str, object], ...] = (
    {
        "type": "triggered_tags",
        "triggers": ["<a", "<b"],
        "tags": [_PERSON_TAG, _WORD_TAG],
        "at_least_one": True,
    },
    {"type": "tags_with_separator", "tags": [_PERSON_TAG, _WORD_TAG], "separator": ", "},
    {
        "type": "sequence",
        "elements": [
            {"type": "or", "elements": [_WORD_TAG, {"type": "const_string", "value": "So: "}]},
            {"type": "star", "content": _WORD_TAG},
            {"type": "any_text"},
        ],
    },
)
TAGS = (
    *(StructuredOutput.of(structural_tag={"format": form}) for form in _FORMATS),
    StructuredOutput.of(  # the older notation
        structural_tag={
            "structures": [{"begin": "<a>", "schema": PERSON, "end": "</a>"}],
            "triggers": ["<a"],
        }
    ),
)
