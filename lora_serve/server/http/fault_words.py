"""What pydantic finds wrong with a field, in words that follow the field's name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pydantic_core import ErrorDetails

OBJECT = "must be an object"
INTEGER = "must be an integer"
# By pydantic's name of the fault; in braces what it says of the limit.
WORDS: Mapping[str, str] = MappingProxyType(
    {
        "bool_type": "must be true or false",
        "dict_type": OBJECT,
        "finite_number": "must be a finite number",
        "float_type": "must be a number",
        "greater_than": "must be above {gt}",
        "greater_than_equal": "must be at least {ge}",
        "int_from_float": INTEGER,
        "int_type": INTEGER,
        "less_than": "must be below {lt}",
        "less_than_equal": "must be at most {le}",
        "list_type": "must be a list",
        "literal_error": "must be {expected}",
        "missing": "this field is required",
        "model_attributes_type": OBJECT,
        "model_type": OBJECT,
        "string_pattern_mismatch": "must match the pattern {pattern}",
        "string_too_long": "must have at most {max_length} characters",
        "string_too_short": "must have at least {min_length} characters",
        "string_type": "must be a string",
        "too_long": "must have at most {max_length} items",
        "too_short": "must have at least {min_length} items",
    }
)


def words_of(fault: ErrorDetails) -> str:
    """A validator's own words, or pydantic's where the table has none, as they are."""
    if fault["type"] in WORDS:
        words = WORDS[fault["type"]].format_map(fault.get("ctx", {}))
        return words.replace(" 1 characters", " 1 character").replace(" 1 items", " 1 item")
    message = fault["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:]
