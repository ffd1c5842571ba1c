"""The paths of instructor, in its modes for tools and for JSON schemas."""

import instructor
from client_paths import BASE_URL, KEY, MODEL, QUESTION, run
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

ASKED = {
    "model": MODEL,
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": 96,
    "temperature": 0,
    "max_retries": 1,
}


class City(BaseModel):
    """A city."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    is_capital: bool


def client(mode):
    return instructor.from_openai(OpenAI(base_url=BASE_URL, api_key=KEY, timeout=120), mode=mode)


def tools():
    assert isinstance(client(instructor.Mode.TOOLS).create(**ASKED, response_model=City), City)


def structured():
    made = client(instructor.Mode.JSON_SCHEMA).create(**ASKED, response_model=City)
    assert isinstance(made, City)


def stream_tools():
    made = list(client(instructor.Mode.TOOLS).create_partial(**ASKED, response_model=City))
    assert made[-1].name
    assert made[-1].is_capital is not None


run(tools=tools, structured=structured, stream_tools=stream_tools)
