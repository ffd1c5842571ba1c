"""The paths of smolagents, with its class for servers of OpenAI's API."""

from client_paths import ADAPTER, BASE_URL, KEY, MODEL, QUESTION, WEATHER, check_weather, run
from smolagents import ChatMessage, OpenAIModel, tool

OURS = {"api_base": BASE_URL, "api_key": KEY, "temperature": 0}
MESSAGES = [ChatMessage(role="user", content=QUESTION)]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
model = OpenAIModel(MODEL, max_tokens=96, **OURS)


@tool
def is_raining(today: bool) -> str:
    """Tell whether it rains.

    Args:
        today: whether today is meant.
    """
    return "It rains."


def chat():
    assert model.generate(MESSAGES).content


def stream():
    assert "".join(delta.content or "" for delta in model.generate_stream(MESSAGES))


def adapter():
    assert OpenAIModel(ADAPTER, max_tokens=8, **OURS).generate(MESSAGES).content


def tools():
    answer = model.generate(MESSAGES, tools_to_call_from=[is_raining])
    assert answer.tool_calls[0].function.name == "is_raining"


def structured():
    check_weather(model.generate(MESSAGES, response_format=SCHEMA).content)


run(chat=chat, stream=stream, adapter=adapter, tools=tools, structured=structured)
