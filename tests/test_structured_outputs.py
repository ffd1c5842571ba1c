from __future__ import annotations

import json
import re

import msgspec
import pytest

from lora_serve.errors import InvalidRequestError
from lora_serve.sampling_params import SamplingParams
from lora_serve.structured_outputs import StructuredOutput

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"const": "é"}}}


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"json": SCHEMA}, "json", json.dumps(SCHEMA, ensure_ascii=False, separators=(",", ":"))),
        ({"json": True}, "json", "true"),
        ({"json_object": True}, "json_object", ""),
        ({"regex": "[a-z]+"}, "regex", "[a-z]+"),
        ({"choice": ("no", "yes")}, "choice", '["no","yes"]'),
        ({"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"structural_tag": {"type": "x"}}, "structural_tag", '{"type":"x"}'),
    ],
)
def test_a_constraint_is_a_kind_and_a_text(given: dict, kind: str, text: str) -> None:
    assert StructuredOutput.of(**given) == StructuredOutput(kind, text)


def test_a_schema_as_text_and_as_an_object_are_equal_and_keep_the_order_of_their_keys() -> None:
    as_text = StructuredOutput.of(json=json.dumps(SCHEMA, indent=2))
    assert as_text == StructuredOutput.of(json=SCHEMA)
    assert list(json.loads(as_text.text)["properties"]) == ["b", "a"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "structured_outputs gives no constraint; give one of json, json_object, regex, "),
        ({"json": {}, "regex": "a"}, "structured_outputs gives json and regex; give one of "),
        ({"json": "{"}, "structured_outputs holds no JSON: "),
        ({"json": {"a": float("nan")}}, "structured_outputs holds no JSON: "),
        ({"json": "[" * 100_000}, "structured_outputs holds no JSON: "),
    ],
)
def test_what_is_no_single_constraint_is_refused(given: dict, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(message)) as refusal:
        StructuredOutput.of(**given)
    assert refusal.value.param == "structured_outputs"


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (
            StructuredOutput("regex", "é" * 32_768 + "a"),
            "the regex has 65537 bytes, at most 65536 are allowed",
        ),
        (StructuredOutput("regex"), "the regex is empty"),
        (StructuredOutput.of(choice=[]), "choice must be a list of non-empty strings"),
        (StructuredOutput.of(choice=["a", ""]), "choice must be a list of non-empty strings"),
        (
            StructuredOutput.of(choice=["a"] * 4097),
            "choice has 4097 strings, at most 4096 are allowed",
        ),
        *(
            (StructuredOutput.of(**given), r"holds a lone surrogate, '\ud800', which no answer")
            for given in (
                {"json": r'{"const":"\ud800"}'},
                {"json": {"const": "\ud800"}},
                {"structural_tag": r'{"type":"\ud800"}'},
                {"choice": ["\ud800"]},
                {"regex": "\ud800"},
                {"grammar": 'start: "\ud800"'},
            )
        ),
    ],
)
def test_sampling_params_refuse_a_constraint_that(
    constraint: StructuredOutput, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(message)):
        SamplingParams(structured_outputs=constraint).verify(20, 1000, 128)


def test_as_much_as_is_allowed_is_taken() -> None:
    for constraint in (
        StructuredOutput("regex", "a" * 65_536),
        StructuredOutput.of(choice=["a"] * 4096),
        StructuredOutput.of(json_object=True),
    ):
        SamplingParams(structured_outputs=constraint).verify(20, 1000, 128)


def test_params_cross_the_wire_with_their_constraint() -> None:
    params = SamplingParams(structured_outputs=StructuredOutput("json", "{}", is_strict=False))
    encoded = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(encoded, type=SamplingParams) == params
