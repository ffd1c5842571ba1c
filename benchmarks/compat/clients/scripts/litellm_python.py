"""The paths of LiteLLM, with its provider for vLLM's servers."""

import litellm
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

SERVED = {"api_base": BASE_URL, "api_key": KEY, "num_retries": 0, "timeout": 120}
MESSAGES = [{"role": "user", "content": QUESTION}]
ASKED = {"model": f"hosted_vllm/{MODEL}", "messages": MESSAGES, "max_tokens": 16, **SERVED}
TOOL = {"name": "weather", "description": "Tell the weather.", "parameters": WEATHER}
TOOLS = [{"type": "function", "function": TOOL}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}


def chat():
    assert litellm.completion(**ASKED).choices[0].message.content


def stream():
    chunks = litellm.completion(**ASKED, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def adapter():
    assert litellm.completion(**{**ASKED, "model": f"hosted_vllm/{ADAPTER}"}).choices


def completions():
    asked = {"model": f"hosted_vllm/{MODEL}", "prompt": "One, two, three,", **SERVED}
    asked |= {"max_tokens": 8, "temperature": 0}
    assert litellm.text_completion(**asked).choices[0].text


def tools():
    answer = litellm.completion(
        **{**ASKED, "max_tokens": 96, "temperature": 0}, tools=TOOLS, tool_choice="required"
    )
    check_weather(answer.choices[0].message.tool_calls[0].function.arguments)


def stream_tools():
    chunks = litellm.completion(
        **{**ASKED, "max_tokens": 96, "temperature": 0},
        tools=TOOLS,
        tool_choice="required",
        stream=True,
    )
    answer = litellm.stream_chunk_builder(list(chunks))
    check_weather(answer.choices[0].message.tool_calls[0].function.arguments)


def structured():
    example = 'Answer {"city": "Paris", "unit": "celsius"} and nothing else.'
    asked = {**ASKED, "messages": [{"role": "user", "content": example}]}
    asked |= {"max_tokens": 96, "temperature": 0}
    answer = litellm.completion(**asked, response_format=SCHEMA)
    check_weather(answer.choices[0].message.content)


def embeddings():
    answer = litellm.embedding(model=f"hosted_vllm/{MODEL}", input=["one", "two"], **SERVED)
    assert len(answer.data) == 2
    assert len(answer.data[0]["embedding"]) == 576


def responses():
    answer = litellm.responses(
        model=f"openai/{MODEL}", input=QUESTION, max_output_tokens=16, **SERVED
    )
    assert answer.output[0].content[0].text


async def messages():
    answer = await litellm.anthropic_messages(**ASKED)
    assert answer["content"][0]["text"]


def errors():
    error = refused(
        litellm.NotFoundError,
        lambda: litellm.completion(**{**ASKED, "model": "hosted_vllm/nowhere"}),
    )
    assert "nowhere" in str(error)


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
    messages=messages,
    errors=errors,
)
