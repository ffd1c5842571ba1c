from __future__ import annotations

from pathlib import Path

from lora_serve import LLM, SamplingParams
from lora_serve.chat.answer import AnswerFormat
from lora_serve.chat.tools import Tool, calls_schema
from lora_serve.structured_outputs import StructuredOutput
from tests.chat.answers import answer_of

CITY = {"properties": {"city": {"$ref": "#/$defs/city"}}, "$defs": {"city": {"type": "string"}}}


def test_a_schema_of_calls_holds_each_tools_own_with_its_references() -> None:
    schema = calls_schema([Tool("now"), Tool("get_weather", None, CITY)], is_parallel=True)
    assert schema["minItems"] == 1
    assert "maxItems" not in schema
    now, weather = schema["items"]["anyOf"]
    assert now["properties"]["name"] == {"const": "now"}
    assert now["properties"]["parameters"]["additionalProperties"] is False
    parameters = weather["properties"]["parameters"]
    assert parameters["type"] == "object"
    place = "#/items/anyOf/1/properties/parameters/$defs/city"
    assert parameters["properties"]["city"] == {"$ref": place}
    found: object = schema
    for key in place.split("/")[1:]:
        found = found[int(key)] if isinstance(found, list) else found[key]
    assert found == {"type": "string"}


PLAN = Tool(
    "plan",
    None,
    {
        "properties": {"step": {"$ref": "#/$defs/step"}, "days": {"enum": [1, 2]}},
        "required": ["step", "days"],
        "additionalProperties": False,
        "$defs": {
            "step": {
                "anyOf": [{"const": "go"}, {"type": "array", "items": {"$ref": "#/$defs/step"}}]
            }
        },
    },
)


def test_whatever_a_model_would_say_a_forced_answer_is_calls(model_path: Path) -> None:
    """A model of random weights, with and without parallel calls, and with one tool's arguments."""
    tools = [Tool("now"), PLAN]
    schemas = {tool.name: tool.schema for tool in tools}
    forms = [
        (calls_schema(tools, is_parallel=True), AnswerFormat(schemas=schemas, must_call=True)),
        (calls_schema(tools, is_parallel=False), AnswerFormat(schemas=schemas, must_call=True)),
        (PLAN.schema, AnswerFormat(schemas=schemas, called="plan")),
    ]
    params = [
        SamplingParams(
            n=4, seed=seed, max_tokens=150, structured_outputs=StructuredOutput.of(json=schema)
        )
        for schema, _ in forms
        for seed in range(2)
    ]
    num_calls = []
    with LLM(str(model_path), max_model_len=256) as llm:
        outputs = llm.generate(["hi"] * len(params), params)
    for index, output in enumerate(outputs):
        for choice in output.outputs:
            answer = answer_of(forms[index // 2][1].parser(""), choice.text)
            if choice.finish_reason == "stop":
                assert answer.content == ""
                assert {name for name, _ in answer.parsed_calls} <= set(schemas)
                num_calls.append(len(answer.calls))
    assert len(num_calls) > 5
    assert min(num_calls) == 1


def test_without_parallel_calls_there_is_one() -> None:
    assert calls_schema([Tool("now")], is_parallel=False)["maxItems"] == 1
