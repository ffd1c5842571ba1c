"""The paths of AutoGen, with its client for OpenAI's API."""

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from client_paths import ADAPTER, BASE_URL, KEY, MODEL, QUESTION, run
from pydantic import BaseModel, ConfigDict, Field

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "family": "unknown",
}
ASKED = [UserMessage(content=QUESTION, source="user")]


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    is_capital: bool


def client(model=MODEL):
    return OpenAIChatCompletionClient(
        model=model, base_url=BASE_URL, api_key=KEY, model_info=INFO, max_tokens=96, temperature=0
    )


def is_raining(today: bool) -> str:
    return "It rains."


RAIN = FunctionTool(is_raining, description="Tell whether it rains.", strict=True)


async def chat():
    answer = await client().create(ASKED)
    assert answer.content
    assert answer.usage.completion_tokens


async def stream():
    *pieces, whole = [piece async for piece in client().create_stream(ASKED)]
    assert "".join(pieces) == whole.content


async def adapter():
    assert (await client(ADAPTER).create(ASKED)).content


async def tools():
    answer = await client().create(ASKED, tools=[RAIN], tool_choice="required")
    assert answer.content[0].name == "is_raining"


async def stream_tools():
    asked = client().create_stream(ASKED, tools=[RAIN], tool_choice="required")
    *_, whole = [piece async for piece in asked]
    assert whole.content[0].name == "is_raining"


async def structured():
    City.model_validate_json((await client().create(ASKED, json_output=City)).content)


async def agent():
    result = await AssistantAgent("helper", client(), tools=[is_raining]).run(task=QUESTION)
    assert result.messages[-1].content


run(
    chat=chat,
    stream=stream,
    adapter=adapter,
    tools=tools,
    stream_tools=stream_tools,
    structured=structured,
    agent=agent,
)
