"""What an answer must match, on its way from a body to the engine."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from lora_serve.errors import InvalidRequestError
from lora_serve.structured_outputs import MAX_TEXT_BYTES, StructuredOutput
from tests.fakes.engine import FakeEngine

BODIES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}
ROUTES = pytest.mark.parametrize("route", BODIES)
SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
SCHEMA_TEXT = '{"type":"object","properties":{"b":{},"a":{}}}'
TAG = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}
TAG_TEXT = '{"structures":[{"begin":"<a>","schema":{},"end":"</a>"}],"triggers":["<a"]'


async def post(client: httpx.AsyncClient, route: str, **fields: object) -> httpx.Response:
    return await client.post(route, json={**BODIES[route], "max_tokens": 2, **fields})


def named(**schema: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, **schema}}


@ROUTES
@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "structured_outputs": None, "guided_json": None}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput("json_object")),
        ({"response_format": named()}, StructuredOutput("json", SCHEMA_TEXT, is_strict=False)),
        ({"response_format": named(strict=True)}, StructuredOutput("json", SCHEMA_TEXT)),
        (
            {"response_format": {**TAG, "type": "structural_tag"}},
            StructuredOutput("structural_tag", TAG_TEXT + ',"type":"structural_tag"}'),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutput("json", SCHEMA_TEXT)),
        ({"structured_outputs": {"json": SCHEMA_TEXT}}, StructuredOutput("json", SCHEMA_TEXT)),
        (
            {"structured_outputs": {"json_object": True, "regex": None}},
            StructuredOutput("json_object"),
        ),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutput("regex", "a+")),
        ({"structured_outputs": {"choice": ["a"]}}, StructuredOutput("choice", '["a"]')),
        ({"structured_outputs": {"grammar": "g"}}, StructuredOutput("grammar", "g")),
        (
            {"structured_outputs": {"structural_tag": TAG, "disable_fallback": True}},
            StructuredOutput("structural_tag", TAG_TEXT + "}"),
        ),
        ({"guided_json": SCHEMA}, StructuredOutput("json", SCHEMA_TEXT)),
        ({"guided_regex": "a+", "guided_decoding_backend": "x"}, StructuredOutput("regex", "a+")),
        ({"guided_choice": ["a"]}, StructuredOutput("choice", '["a"]')),
        ({"guided_grammar": "g"}, StructuredOutput("grammar", "g")),
    ],
)
async def test_the_engine_gets_one_constraint_from(
    route: str,
    fields: dict[str, object],
    constraint: StructuredOutput | None,
    engine: FakeEngine,
    client: httpx.AsyncClient,
) -> None:
    assert (await post(client, route, **fields)).status_code == 200
    assert engine.seen[0].params.structured_outputs == constraint


LARGE = {"enum": ["a" * MAX_TEXT_BYTES]}
SURROGATE = r'{"const":"\ud800"}'


@ROUTES
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "`type` is one of text, "),
        ({"response_format": "json"}, "response_format", "must be an object whose `type`"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "an object `schema`"),
        ({"response_format": named(strict="yes")}, "response_format", "`strict`"),
        ({"response_format": named(shema={})}, "response_format", "unknown fields ['shema']"),
        ({"response_format": {"type": "text", "a": 1}}, "response_format", "unknown fields ['a']"),
        ({"response_format": named(schema=LARGE)}, "response_format", "at most 65536 are allowed"),
        ({"structured_outputs": {}}, "structured_outputs", "gives no constraint; give one of"),
        ({"structured_outputs": []}, "structured_outputs", "must be an object with one of"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs",
            "gives regex and choice; give one of",
        ),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs", "a string as its regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "non-empty strings"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs", "a list of strings"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "holds no JSON"),
        ({"structured_outputs": {"json": SURROGATE}}, "structured_outputs", "lone surrogate"),
        ({"structured_outputs": {"structural_tag": SURROGATE}}, "structured_outputs", "surrogate"),
        ({"structured_outputs": {"jsn": {}}}, "structured_outputs", "unknown fields ['jsn']"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " *"}},
            "structured_outputs",
            "has whitespace_pattern, which is not supported",
        ),
        ({"guided_json": [1]}, "guided_json", "a string or an object or true or false"),
        ({"guided_json": SURROGATE}, "guided_json", "the json holds a lone surrogate"),
        ({"guided_json": LARGE}, "guided_json", "at most 65536 are allowed; shorten it"),
        ({"guided_regex": "a" * 65_537}, "guided_regex", "has a regex of 65537 characters"),
        ({"guided_regex": ""}, "guided_regex", "the regex is empty"),
        ({"guided_whitespace_pattern": "x"}, "guided_whitespace_pattern", "not supported"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "guided_regex",
            "response_format and guided_regex exclude each other; give one of them",
        ),
    ],
)
async def test_a_constraint_is_refused_by_its_field(
    route: str, fields: dict[str, object], param: str, message: str, client: httpx.AsyncClient
) -> None:
    response = await post(client, route, **fields)
    error: dict[str, Any] = response.json()["error"]
    assert response.status_code == 400, error
    assert error["param"] == param
    assert message in error["message"]
    assert len(error["message"]) < 500


@ROUTES
async def test_what_the_grammars_refuse_is_named_by_the_bodys_field(
    route: str, engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    message = "structured_outputs: no grammar can be made of it: too odd; simplify it"
    engine.error = InvalidRequestError(message, "structured_outputs")
    response = await post(client, route, guided_regex="(")
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "guided_regex"
    assert error["message"].startswith("guided_regex: no grammar can be made of it")


SCHEMA_OF_F = {"type": "object", "properties": {}}
FORCED = {  # the same call, forced in each API's words
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA_OF_F}}],
        "tool_choice": "required",
    },
    "/v1/responses": {
        "input": "hi",
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA_OF_F}],
        "tool_choice": "required",
    },
    "/v1/messages": {
        "model": "base/model",
        "max_tokens": 8,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"name": "f", "input_schema": SCHEMA_OF_F}],
        "tool_choice": {"type": "any"},
    },
}


@pytest.mark.parametrize("path", FORCED)
async def test_what_the_grammars_refuse_of_forced_calls_is_told_of_the_tools(
    path: str, engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    message = "structured_outputs: no grammar can be made of it: too odd; simplify it"
    engine.error = InvalidRequestError(message, "structured_outputs")
    response = await client.post(path, json=FORCED[path])
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"].startswith("tools: no grammar can be made of it")
    assert error.get("param", "tools") == "tools"
