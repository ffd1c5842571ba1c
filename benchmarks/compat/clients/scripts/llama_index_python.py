"""The paths of LlamaIndex, with its class for servers of OpenAI's API."""

from client_paths import ADAPTER, BASE_URL, KEY, MODEL, QUESTION, run
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict, Field

OURS = {"api_base": BASE_URL, "api_key": KEY, "max_retries": 0, "timeout": 120, "temperature": 0}
CHAT = {**OURS, "is_chat_model": True, "is_function_calling_model": True}
MESSAGES = [ChatMessage(role="user", content=QUESTION)]
model = OpenAILike(model=MODEL, max_tokens=96, **CHAT)


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    is_capital: bool


def is_raining(today: bool) -> str:
    """Tell whether it rains."""
    return "It rains."


def chat():
    assert model.chat(MESSAGES).message.content


def stream():
    assert "".join(chunk.delta or "" for chunk in model.stream_chat(MESSAGES))


def adapter():
    assert OpenAILike(model=ADAPTER, max_tokens=8, **CHAT).chat(MESSAGES).message.content


def completions():
    plain = OpenAILike(model=MODEL, max_tokens=8, is_chat_model=False, **OURS)
    assert plain.complete("One, two, three,").text


def tools():
    offered = [FunctionTool.from_defaults(is_raining)]
    answer = model.chat_with_tools(offered, user_msg=QUESTION, tool_required=True)
    (call,) = model.get_tool_calls_from_response(answer)
    assert call.tool_name == "is_raining"


def structured():
    asked = OpenAILike(
        model=MODEL, max_tokens=96, should_use_structured_outputs=True, **CHAT
    ).as_structured_llm(City)
    assert isinstance(asked.chat(MESSAGES).raw, City)


def embeddings():
    ours = {"api_base": BASE_URL, "api_key": KEY, "max_retries": 0}
    model = OpenAILikeEmbedding(model_name=MODEL, **ours)
    assert [len(row) for row in model.get_text_embedding_batch(["one", "two"])] == [576, 576]


run(
    chat=chat,
    stream=stream,
    adapter=adapter,
    completions=completions,
    tools=tools,
    structured=structured,
    embeddings=embeddings,
)
