"""The paths of OpenAI's Agents SDK, over chats and over responses."""

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from client_paths import BASE_URL, KEY, MODEL, QUESTION, run
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict, Field

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0, timeout=120)
CHAT = OpenAIChatCompletionsModel(MODEL, client)
RESPONSES = OpenAIResponsesModel(MODEL, client)
called = []


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    is_capital: bool


@function_tool
def is_raining(today: bool) -> str:
    """Tell whether it rains."""
    called.append(today)
    return "It rains."


def agent(model, max_tokens=16, **settings):
    return Agent(
        "helper",
        model=model,
        model_settings=ModelSettings(max_tokens=max_tokens, temperature=0),
        **settings,
    )


def with_tool(model):
    """Its first answer calls the tool; the second one is text."""
    made = agent(model, 48, tools=[is_raining])
    made.model_settings.tool_choice = "required"
    return made


async def chat():
    assert (await Runner.run(agent(CHAT), QUESTION)).final_output


async def stream():
    result = Runner.run_streamed(agent(CHAT), QUESTION)
    assert [event async for event in result.stream_events()]
    assert result.final_output


async def tools():
    called.clear()
    assert (await Runner.run(with_tool(CHAT), QUESTION)).final_output
    assert called


async def structured():
    made = agent(CHAT, 96, output_type=City)
    assert isinstance((await Runner.run(made, QUESTION)).final_output, City)


async def responses():
    assert (await Runner.run(agent(RESPONSES), QUESTION)).final_output


async def stream_responses():
    result = Runner.run_streamed(agent(RESPONSES), QUESTION)
    assert [event async for event in result.stream_events()]
    assert result.final_output


async def tools_responses():
    called.clear()
    assert (await Runner.run(with_tool(RESPONSES), QUESTION)).final_output
    assert called


async def structured_responses():
    made = agent(RESPONSES, 96, output_type=City)
    assert isinstance((await Runner.run(made, QUESTION)).final_output, City)


run(
    chat=chat,
    stream=stream,
    tools=tools,
    structured=structured,
    responses=responses,
    stream_responses=stream_responses,
    tools_responses=tools_responses,
    structured_responses=structured_responses,
)
