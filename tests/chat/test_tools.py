from __future__ import annotations

from lora_serve.chat.tools import Tool, calls_schema

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


def test_without_parallel_calls_there_is_one() -> None:
    assert calls_schema([Tool("now")], is_parallel=False)["maxItems"] == 1
