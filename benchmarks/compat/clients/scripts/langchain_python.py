"""The paths of LangChain, over chats, responses and embeddings."""

from client_paths import ADAPTER, BASE_URL, KEY, MODEL, QUESTION, run
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel, ConfigDict, Field

OURS = {"base_url": BASE_URL, "api_key": KEY, "max_retries": 0, "timeout": 120}
chat_model = ChatOpenAI(model=MODEL, max_tokens=16, **OURS)
long_model = ChatOpenAI(model=MODEL, max_tokens=96, temperature=0, **OURS)
responses_model = ChatOpenAI(
    model=MODEL, max_tokens=96, temperature=0, use_responses_api=True, **OURS
)


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    is_capital: bool


class Day(BaseModel):
    model_config = ConfigDict(extra="forbid")
    today: bool


@tool(args_schema=Day)
def is_raining(today: bool) -> str:
    """Tell whether it rains."""
    return "It rains."


def chat():
    answer = chat_model.invoke(QUESTION)
    assert answer.content
    assert answer.usage_metadata["output_tokens"] <= 16


def stream():
    assert "".join(chunk.content for chunk in chat_model.stream(QUESTION))


def adapter():
    assert ChatOpenAI(model=ADAPTER, max_tokens=8, **OURS).invoke(QUESTION).content


def completions():
    assert OpenAI(model=MODEL, max_tokens=8, temperature=0, **OURS).invoke("One, two, three,")


def tools():
    answer = long_model.bind_tools([is_raining], tool_choice="any").invoke(QUESTION)
    (call,) = answer.tool_calls
    assert is_raining.invoke(call["args"]) == "It rains."


def stream_tools():
    bound = long_model.bind_tools([is_raining], tool_choice="is_raining")
    first, *rest = bound.stream(QUESTION)
    assert sum(rest, first).tool_calls[0]["name"] == "is_raining"


def structured():
    for method in ("json_schema", "function_calling"):
        made = long_model.with_structured_output(City, method=method).invoke(QUESTION)
        assert isinstance(made, City), method


def embeddings():
    ours = OpenAIEmbeddings(model=MODEL, check_embedding_ctx_length=False, **OURS)
    assert [len(row) for row in ours.embed_documents(["one", "two"])] == [576, 576]


def responses():
    assert responses_model.invoke(QUESTION).text


def stream_responses():
    assert "".join(chunk.text for chunk in responses_model.stream(QUESTION))


def tools_responses():
    answer = responses_model.bind_tools([is_raining], tool_choice="any").invoke(QUESTION)
    assert answer.tool_calls[0]["name"] == "is_raining"


def structured_responses():
    made = responses_model.with_structured_output(City, method="json_schema").invoke(QUESTION)
    assert isinstance(made, City)


run(
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
)
