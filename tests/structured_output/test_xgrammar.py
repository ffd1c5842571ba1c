"""xgrammar behind the door: what it compiles answers follow, and nothing slips past it."""

from __future__ import annotations

import json
import re
from random import Random
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import numpy as np
import pytest

from lora_serve.chat.tools import Tool, calls_schema
from lora_serve.errors import InvalidRequestError
from lora_serve.structured_output.backend import Vocabulary, load_backend
from lora_serve.structured_output.client import GrammarProcess
from lora_serve.structured_output.service import NewTokens
from lora_serve.structured_outputs import StructuredOutput
from lora_serve.text.tokenizer import Tokenizer
from tests.structured_output.conftest import require_xgrammar
from tests.structured_output.test_client import (
    HOSTILE,
    YES_OR_NO,
    allowed,
    allowed_of,
    follow,
    outcome,
    replies,
)

if TYPE_CHECKING:
    from lora_serve.structured_output.xgrammar import XGrammarBackend

TEXTS = [*(bytes([byte]) for byte in range(256)), b'{"', b'":', b'", ', b"true", b"<s>", b""]
SPECIAL, EOS = len(TEXTS) - 2, len(TEXTS) - 1
SIZE = len(TEXTS) + 3  # a model may have more logits than its tokenizer has tokens


@pytest.fixture(scope="module")
def library() -> XGrammarBackend:
    require_xgrammar()

    def token_bytes(token_id: int) -> bytes:
        return TEXTS[token_id] if token_id < len(TEXTS) else b""

    backend: Any = load_backend("xgrammar", Vocabulary("", SIZE, (EOS,), token_bytes, {SPECIAL}))
    return backend


def next_tokens(matcher: Any) -> set[int]:
    bits = np.unpackbits(np.frombuffer(matcher.bitmask(), np.uint8), bitorder="little")
    return {int(token_id) for token_id in np.flatnonzero(bits)}


def matches(library: XGrammarBackend, constraint: StructuredOutput, text: str) -> bool:
    """Whether the text is a whole answer, byte by byte."""
    matcher = library.compile(constraint).matcher()
    for byte in text.encode():
        if matcher.is_finished or byte not in next_tokens(matcher):
            return False
        matcher.accept(byte)
    return matcher.is_finished or EOS in next_tokens(matcher)


def random_answer(library: XGrammarBackend, constraint: StructuredOutput, rng: Random) -> bytes:
    """An answer that prefers what closes a value; b"" if it does not end soon."""
    matcher, answer = library.compile(constraint).matcher(), b""
    for _ in range(300):
        if matcher.is_finished:
            return answer
        tokens = sorted(next_tokens(matcher))
        assert tokens, f"nothing may follow {answer!r}"
        assert tokens[-1] <= EOS
        assert SPECIAL not in tokens
        closing = [i for i in tokens if i == EOS or TEXTS[i][:1] in (b'"', b"}", b"]", b",")]
        token_id = rng.choice(closing if closing and rng.random() < 0.5 else tokens)
        matcher.accept(token_id)
        if token_id == EOS:
            assert matcher.is_finished
            return answer
        answer += TEXTS[token_id]
    return b""


OBJECT = {
    "type": "object",
    "properties": {"b": {"type": "boolean"}, "é": {"type": ["null", "integer"], "minimum": 3}},
    "required": ["b"],
}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/a~1node"}}}
SCHEMAS: tuple[dict[str, Any], ...] = (
    {},
    {"type": "object"},
    OBJECT,
    {**OBJECT, "additionalProperties": False},
    {**OBJECT, "additionalProperties": {"type": "string", "minLength": 2, "maxLength": 5}},
    {**OBJECT, "required": ["unlisted"]},
    {"type": "object", "minProperties": 1, "maxProperties": 2},
    {"type": "array", "items": {"enum": [1, 'a\n"', None, {"x": [1.5]}]}, "minItems": 2},
    {"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "boolean"}},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "^a.[^x]+$"},
    {"type": "string", "pattern": "a|b"},
    {"type": "string", "pattern": r"^\s\W\S$"},
    {"type": "string", "format": "date"},
    {"type": "integer", "exclusiveMinimum": -7, "maximum": 120},
    {"type": "number", "minimum": -0.25, "exclusiveMaximum": 99999.999},
    {"type": "integer", "multipleOf": 7},
    {"type": "string", "enum": [1, "a"]},
    {"anyOf": [{"const": "é\t"}, {"type": "array", "maxItems": 1}]},
    {"oneOf": [{"type": "string"}, {"type": "number"}]},
    {"allOf": [{"type": "integer", "minimum": 3}]},
    {"$ref": "#/$defs/a~1node", "$defs": {"a/node": NODE}},
)


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_whatever_the_masks_allow_is_json_that_the_schema_allows(
    schema: dict[str, Any], library: XGrammarBackend
) -> None:
    rng, validator = Random(3), jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    answers = [random_answer(library, StructuredOutput.of(json=schema), rng) for _ in range(25)]
    ended = [answer for answer in answers if answer]
    assert len(ended) > 5
    for answer in ended:
        assert validator.is_valid(json.loads(answer)), answer


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {"type": "integer"}}, "contains"),
        ({"type": "array", "items": [{}]}, "items as a list"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
        ({"type": "integer", "multipleOf": 2, "minimum": 3}, "multipleOf"),
        ({"type": "integer", "minimum": 10**30}, "minimum 1000"),
        ({"type": "number", "minimum": 0.12345678}, "minimum 0.12345678"),
        ({"type": "string", "format": "idn-email"}, 'format "idn-email"'),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "maxLength beside pattern"),
        ({"type": "string", "pattern": '"'}, "pattern"),
        ({"type": "string", "pattern": r"\\"}, "pattern"),
        ({"type": "string", "pattern": "a^b"}, "pattern"),
        ({"type": "object", "patternProperties": {"a": {}}}, "patternProperties"),
        ({"type": "object", "propertyNames": {"maxLength": 2}}, "propertyNames"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"minLength": 2, "minimum": 3}, "minLength without a type"),
        ({"type": "integer", "anyOf": [{"minimum": 3}]}, "type beside anyOf"),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "allOf of several"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf of schemas"),
        ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {}}}, r"minimum beside \$ref"),
        ({"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"not": {}}}}, "not"),
        ({"if": {"type": "integer"}, "then": {"minimum": 3}}, "if, then"),
    ],
)
def test_what_it_would_pass_over_is_refused_by_name_or_left_out_where_that_is_asked_for(
    schema: dict[str, Any], named: str, library: XGrammarBackend
) -> None:
    constraint = StructuredOutput.of(json=schema)
    with pytest.raises(InvalidRequestError, match=f"xgrammar does not .*{named}.*llguidance"):
        library.compile(constraint)
    assert library.compile(StructuredOutput("json", constraint.text, is_strict=False))


def test_alternatives_that_a_property_tells_apart_exclude_one_another(
    library: XGrammarBackend,
) -> None:
    kinds = {
        name: {"type": "object", "properties": {"kind": {"const": name}}, "required": ["kind"]}
        for name in ("cat", "dog")
    }
    either = [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]
    constraint = StructuredOutput.of(json={"oneOf": either, "$defs": kinds})
    assert matches(library, constraint, '{"kind": "dog"}')
    assert not matches(library, constraint, '{"kind": "cow"}')


def test_the_calls_that_a_tool_choice_forces_follow_their_tools_schemas(
    library: XGrammarBackend,
) -> None:
    parameters = {"type": "object", "properties": {"to": {"$ref": "#/$defs/city"}}}
    schema = {**parameters, "$defs": {"city": {"enum": ["Rome"]}}, "required": ["to"]}
    constraint = StructuredOutput.of(
        json=calls_schema([Tool("go", parameters=schema), Tool("stay")], is_parallel=False)
    )
    assert matches(library, constraint, '[{"name": "go", "parameters": {"to": "Rome"}}]')
    assert matches(library, constraint, '[{"name": "stay", "parameters": {}}]')
    assert not matches(library, constraint, '[{"name": "go", "parameters": {"to": "Oslo"}}]')


@pytest.mark.parametrize(
    ("constraint", "right", "wrong"),
    [
        (StructuredOutput.of(json_object=True), '{"a": [1]}', "[1]"),
        (StructuredOutput.of(regex="^a.{1,2}(x|é)$"), "abé", "a\né"),
        (StructuredOutput.of(regex=r"(?:\d+|(?<n>[^\]]))"), "12", "]"),
        (StructuredOutput.of(choice=["yes\n", 'n"o', "n"]), 'n"o', "ye"),
        (StructuredOutput.of(grammar='root ::= "(" root ")" | [a-c]+'), "((ab))", "((ab)"),
        (StructuredOutput.of(grammar='root ::= root "a" | "(="'), "(=aa", "(="[:1]),
        (
            StructuredOutput.of(
                structural_tag={
                    "structures": [{"begin": "<t>", "schema": OBJECT, "end": "</t>"}],
                    "triggers": ["<t"],
                }
            ),
            'so: <t>{"b": true, "x": 1}</t>!',
            'so: <t>{"b": 1}</t>!',
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, StructuredOutput) else "",
)
def test_each_kind_of_constraint_is_followed(
    constraint: StructuredOutput, right: str, wrong: str, library: XGrammarBackend
) -> None:
    assert matches(library, constraint, right)
    assert not matches(library, constraint, wrong)


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (StructuredOutput.of(grammar='start: "a"'), "not in Lark's; .*llguidance"),
        (StructuredOutput.of(grammar='root ::= "a" (= "b")'), "not of GBNF's notation"),
        (StructuredOutput.of(grammar="root ::= Token(1)"), "not of GBNF's notation"),
        (StructuredOutput.of(grammar="root ::= root"), "no answer can match it"),
        (StructuredOutput.of(grammar='root ::= "a" b'), 'Rule "b" is not defined'),
        *(
            (StructuredOutput.of(regex=pattern), "xgrammar does not know .*llguidance")
            for pattern in ("a^b", "a$|b", r"\Aa", "[[:alpha:]]", "[a&&b]", r"\ud800", "(?<=a)b")
        ),
        (StructuredOutput.of(regex="(?i)a"), "does not know"),
        (StructuredOutput.of(regex=r"a\b"), "does not know"),
        (
            StructuredOutput.of(
                structural_tag={
                    "structures": [
                        {"begin": "<t>", "schema": {"not": {}}, "end": "</t>"},
                    ],
                    "triggers": ["<t"],
                }
            ),
            "xgrammar does not enforce not",
        ),
    ],
    ids=repr,
)
def test_what_it_reads_as_something_else_is_refused(
    constraint: StructuredOutput, reason: str, library: XGrammarBackend
) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as refusal:
        library.compile(constraint)
    assert not re.search(r"\.cc:|\[\d\d:", str(refusal.value))


@pytest.mark.parametrize(
    "constraint",
    [
        StructuredOutput("regex", "((a{0,9999}){0,9999}b{0,99999}){0,9999}"),
        StructuredOutput(
            "grammar",
            "root ::= r0\n"
            + "".join(f"r{i} ::= r{i + 1} r{i + 1} | r{i + 1}\n" for i in range(200))
            + 'r200 ::= "y" | ""\n',
        ),
    ],
    ids=["repetitions", "ambiguous"],
)
def test_a_grammar_that_is_slow_to_follow_is_refused(
    constraint: StructuredOutput, xgrammars: GrammarProcess
) -> None:
    assert "xgrammar takes more than 0.1 s" in outcome(xgrammars, constraint).error


def test_no_mask_allows_what_is_no_utf_8(library: XGrammarBackend) -> None:
    matcher = library.compile(StructuredOutput.of(regex="[^a]+")).matcher()
    assert 0xED in next_tokens(matcher)
    matcher.accept(0xED)
    assert next_tokens(matcher) == set(range(0x80, 0xA0))  # else a surrogate


def test_end_tokens_are_allowed_where_the_grammar_may_end_and_nowhere_else(
    xgrammars: GrammarProcess, tokenizer: Tokenizer
) -> None:
    end = set(tokenizer.eos_token_ids)
    xgrammars.open("one", StructuredOutput.of(regex="a{1,3}"))
    assert not end & set(allowed(replies(xgrammars)["one"]))
    (letter,) = tokenizer.encode("a", add_special_tokens=False)
    assert end <= set(allowed(follow(xgrammars, [letter])))
    assert follow(xgrammars, [letter, letter]).is_finished
    xgrammars.close("one")


REFUSED = {name: each for name, each in HOSTILE.items() if name != "nested"} | {
    "a deep grammar": StructuredOutput("grammar", "root ::= " + "(" * 20_000 + ")" * 20_000),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_hostile_constraint_is_refused_and_harms_no_other(
    name: str, xgrammars: GrammarProcess
) -> None:
    outcome(xgrammars, YES_OR_NO)
    xgrammars.open("bystander", YES_OR_NO)
    replies(xgrammars)
    reply = outcome(xgrammars, REFUSED[name])
    assert reply.error.startswith("structured_outputs: ")
    assert not reply.is_fault
    assert len(reply.error) < 400
    xgrammars.advance([NewTokens("bystander", (allowed_of(xgrammars),))])
    assert not replies(xgrammars)["bystander"].error
    xgrammars.close("bystander")
