"""The paths of OpenAI's client for Python."""

from client_paths import (
    ADAPTER,
    BASE_URL,
    KEY,
    MODEL,
    QUESTION,
    WEATHER,
    check_weather,
    refused,
    run,
)
from openai import NotFoundError, OpenAI
from pydantic import BaseModel, ConfigDict, Field

client = OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0, timeout=120)
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 16}
TOOL = {"name": "weather", "description": "Tell the weather.", "parameters": WEATHER}
TOOLS = [{"type": "function", "function": TOOL}]


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    is_capital: bool


def models():
    assert {model.id for model in client.models.list()} >= {MODEL, ADAPTER}
    assert client.models.retrieve(MODEL).id == MODEL


def chat():
    answer = client.chat.completions.create(**ASKED)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens <= 16


def stream():
    chunks = list(
        client.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert chunks[-1].usage.completion_tokens


def adapter():
    answer = client.chat.completions.create(**{**ASKED, "model": ADAPTER})
    assert answer.model == ADAPTER


def completions():
    asked = {"model": MODEL, "prompt": "One, two, three,", "max_tokens": 8, "logprobs": 2}
    asked |= {"temperature": 0}  # else the answer may be empty
    answer = client.completions.create(**asked)
    assert len(answer.choices[0].logprobs.token_logprobs) == answer.usage.completion_tokens
    assert "".join(c.choices[0].text for c in client.completions.create(**asked, stream=True))


def tools():
    answer = client.chat.completions.create(
        **{**ASKED, "max_tokens": 96, "temperature": 0}, tools=TOOLS, tool_choice="required"
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    check_weather(call.function.arguments)
    said = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    history = [*ASKED["messages"], answer.choices[0].message, said]
    assert client.chat.completions.create(**{**ASKED, "messages": history}, tools=TOOLS).choices


def stream_tools():
    named = {"type": "function", "function": {"name": "weather"}}
    asked = {**ASKED, "max_tokens": 96, "temperature": 0, "tools": TOOLS, "tool_choice": named}
    with client.chat.completions.stream(**asked) as events:
        (call,) = events.get_final_completion().choices[0].message.tool_calls
    check_weather(call.function.arguments)


def structured():
    answer = client.chat.completions.parse(
        **{**ASKED, "max_tokens": 96, "temperature": 0}, response_format=City
    )
    assert isinstance(answer.choices[0].message.parsed, City)


def embeddings():
    answer = client.embeddings.create(model=MODEL, input=["one", "two"])
    assert len(answer.data) == 2
    assert len(answer.data[0].embedding) == 576


def responses():
    answer = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=16)
    assert answer.output_text
    assert answer.usage.output_tokens <= 16


def stream_responses():
    asked = {"model": MODEL, "input": QUESTION, "max_output_tokens": 16}
    kinds = [event.type for event in client.responses.create(**asked, stream=True)]
    assert kinds[0] == "response.created", kinds
    assert kinds[-1] in ("response.completed", "response.incomplete"), kinds
    with client.responses.stream(**asked) as events:
        assert "response.output_text.delta" in [event.type for event in events]


def tools_responses():
    tool = {"type": "function", **TOOL}
    answer = client.responses.create(
        model=MODEL,
        input=QUESTION,
        max_output_tokens=96,
        temperature=0,
        tools=[tool],
        tool_choice="required",
    )
    (call,) = (item for item in answer.output if item.type == "function_call")
    check_weather(call.arguments)


def structured_responses():
    answer = client.responses.parse(
        model=MODEL, input=QUESTION, max_output_tokens=96, temperature=0, text_format=City
    )
    assert isinstance(answer.output_parsed, City)


def errors():
    error = refused(
        NotFoundError, lambda: client.chat.completions.create(**{**ASKED, "model": "nowhere"})
    )
    assert "nowhere" in error.message


run(
    models=models,
    chat=chat,
    stream=stream,
    adapter=adapter,
    completions=completions,
    tools=tools,
    stream_tools=stream_tools,
    structured=structured,
    embeddings=embeddings,
    responses=responses,
    stream_responses=stream_responses,
    tools_responses=tools_responses,
    structured_responses=structured_responses,
    errors=errors,
)
