"""The paths of Anthropic's client for Python."""

from anthropic import Anthropic, NotFoundError
from client_paths import ADAPTER, KEY, MODEL, QUESTION, SERVER, WEATHER, check_weather, refused, run

client = Anthropic(base_url=SERVER, api_key=KEY, max_retries=0, timeout=120)
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16}
TOOLS = [{"name": "weather", "description": "Tell the weather.", "input_schema": WEATHER}]
ONE = {"type": "any", "disable_parallel_tool_use": True}
WITH_TOOLS = {**ASKED, "max_tokens": 192, "tools": TOOLS}


def messages():
    answer = client.messages.create(**ASKED, system="Be brief.")
    assert answer.content[0].text
    assert answer.usage.output_tokens <= 16


def stream_messages():
    with client.messages.stream(**ASKED) as events:
        assert "".join(events.text_stream)
        assert events.get_final_message().stop_reason in ("end_turn", "max_tokens")


def adapter():
    answer = client.messages.create(**{**ASKED, "model": ADAPTER})
    assert answer.model == ADAPTER


def tools():
    answer = client.messages.create(**WITH_TOOLS, tool_choice=ONE)
    (call,) = (block for block in answer.content if block.type == "tool_use")
    check_weather(call.input)
    assert answer.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    history = [
        *ASKED["messages"],
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    assert client.messages.create(**{**WITH_TOOLS, "max_tokens": 16, "messages": history}).content


def stream_tools():
    choice = {"type": "tool", "name": "weather"}
    with client.messages.stream(**WITH_TOOLS, tool_choice=choice) as events:
        (call,) = (b for b in events.get_final_message().content if b.type == "tool_use")
    check_weather(call.input)


def count_tokens():
    asked = {key: ASKED[key] for key in ("model", "messages")}
    assert client.messages.count_tokens(**asked).input_tokens > 5


def errors():
    error = refused(NotFoundError, lambda: client.messages.create(**{**ASKED, "model": "nowhere"}))
    assert "nowhere" in error.message
    assert error.body["type"] == "error"


run(
    messages=messages,
    stream_messages=stream_messages,
    adapter=adapter,
    tools=tools,
    stream_tools=stream_tools,
    count_tokens=count_tokens,
    errors=errors,
)
