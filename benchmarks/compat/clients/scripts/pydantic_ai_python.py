"""The paths of Pydantic AI, over chats, responses and messages."""

from anthropic import AsyncAnthropic
from client_paths import BASE_URL, KEY, MODEL, QUESTION, SERVER, run
from pydantic import BaseModel, ConfigDict, Field
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.embeddings import Embedder
from pydantic_ai.embeddings.openai import OpenAIEmbeddingModel
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

OURS = OpenAIProvider(base_url=BASE_URL, api_key=KEY)
CHAT = OpenAIChatModel(MODEL, provider=OURS)
RESPONSES = OpenAIResponsesModel(MODEL, provider=OURS)
THEIRS = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=SERVER, api_key=KEY))
MESSAGES = AnthropicModel(MODEL, provider=THEIRS)
SHORT = {"max_tokens": 16}


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    is_capital: bool


async def chat():
    assert (await Agent(CHAT, model_settings=SHORT).run(QUESTION)).output


async def stream():
    async with Agent(CHAT, model_settings=SHORT).run_stream(QUESTION) as result:
        assert await result.get_output()


async def tools():
    answer = await Agent(
        CHAT, output_type=City, model_settings={"max_tokens": 96, "temperature": 0}
    ).run(QUESTION)
    assert isinstance(answer.output, City)


async def structured():
    agent = Agent(
        CHAT, output_type=NativeOutput(City), model_settings={"max_tokens": 96, "temperature": 0}
    )
    assert isinstance((await agent.run(QUESTION)).output, City)


async def responses():
    assert (await Agent(RESPONSES, model_settings=SHORT).run(QUESTION)).output


async def stream_responses():
    async with Agent(RESPONSES, model_settings=SHORT).run_stream(QUESTION) as result:
        assert await result.get_output()


async def tools_responses():
    agent = Agent(RESPONSES, output_type=City, model_settings={"max_tokens": 96, "temperature": 0})
    assert isinstance((await agent.run(QUESTION)).output, City)


async def messages():
    assert (await Agent(MESSAGES, model_settings=SHORT).run(QUESTION)).output


async def stream_messages():
    async with Agent(MESSAGES, model_settings=SHORT).run_stream(QUESTION) as result:
        assert await result.get_output()


async def embeddings():
    embedder = Embedder(OpenAIEmbeddingModel(MODEL, provider=OURS))
    assert len((await embedder.embed_documents(["one", "two"])).embeddings) == 2


run(
    chat=chat,
    stream=stream,
    tools=tools,
    structured=structured,
    embeddings=embeddings,
    responses=responses,
    stream_responses=stream_responses,
    tools_responses=tools_responses,
    messages=messages,
    stream_messages=stream_messages,
)
