"""Whatever a body holds, the server answers 200 or says in the common shape what is wrong."""

from __future__ import annotations

import json

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from lora_serve.config import ServerConfig
from lora_serve.server.app import create_app
from lora_serve.server.openai.protocol import CompletionBody, EmbeddingBody
from lora_serve.server.operation import Operation
from lora_serve.server.routes import OPERATIONS
from lora_serve.server.sagemaker.protocol import InvocationBody
from tests.fakes.engine import FakeEngine, fake_config
from tests.server.clients import error_of

# But for pauses: a server that is paused answers nothing more (tests/server/admin/test_pauses.py).
ROUTES = {each.path: each for each in OPERATIONS if each.body is not None and each.path != "/pause"}

# Surrogates too: json.dumps writes them as escapes, which JSON's grammar allows.
TEXTS = st.text(st.characters(exclude_categories=()), max_size=12)
NUMBERS = (
    st.integers(-2, 300)
    | st.sampled_from([2**31, 2**63, -(2**64), 10**400, 0.5, 1e-300, 1e308])
    | st.floats()
)
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = TEXTS | st.sampled_from(["{}", '{"a": 1}', "[", '{"a": NaN}']) | VALUES
PAST_CALLS = st.lists(
    st.fixed_dictionaries(
        {"function": st.fixed_dictionaries({"name": TEXTS, "arguments": ARGUMENTS})},
        optional={"id": TEXTS, "type": st.just("function")},
    ),
    max_size=2,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "tool", "wizard"]),
            "content": TEXTS | st.none(),
        },
        optional={
            "name": TEXTS,
            "tool_calls": st.none() | PAST_CALLS | VALUES,
            "tool_call_id": TEXTS,
            "reasoning_content": TEXTS,
        },
    ),
    max_size=3,
)
TOOL_NAMES = st.sampled_from(["f", "g", "", "a b"])
FUNCTIONS = st.fixed_dictionaries(
    {"name": TOOL_NAMES},
    optional={"description": TEXTS, "parameters": VALUES | st.just({"type": "object"})},
)
TOOLS = st.lists(
    st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTIONS}), max_size=3
)
PARTS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["input_text", "output_text", "x"])}, optional={"text": TEXTS}
    ),
    max_size=2,
)
ITEMS = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(
                ["message", "reasoning", "function_call", "function_call_output"]
            )
        },
        optional={
            "role": st.sampled_from(["system", "user", "assistant", "developer", "wizard"]),
            "content": TEXTS | PARTS | VALUES,
            "call_id": TEXTS,
            "name": TEXTS,
            "arguments": ARGUMENTS,
            "output": TEXTS | PARTS,
            "summary": PARTS,
        },
    ),
    max_size=3,
)
PROMPTS = TEXTS | st.lists(st.integers(-1, 270), max_size=5) | st.lists(TEXTS, max_size=3)
BLOCKS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image"])},
        optional={
            "text": TEXTS,
            "id": TEXTS,
            "name": TOOL_NAMES,
            "input": VALUES | st.just({}),
            "tool_use_id": TEXTS,
            "content": TEXTS | VALUES,
            "is_error": st.booleans(),
            "thinking": TEXTS,
            "cache_control": VALUES,
        },
    ),
    max_size=3,
)
ANTHROPIC_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["user", "assistant", "system", "wizard"]),
            "content": TEXTS | BLOCKS,
        }
    ),
    max_size=3,
)
ANTHROPIC_TOOLS = st.lists(
    st.fixed_dictionaries(
        {"name": TOOL_NAMES, "input_schema": VALUES | st.just({"type": "object"})},
        optional={"type": st.sampled_from(["custom", "bash_20250124"]), "description": TEXTS},
    ),
    max_size=3,
)
ANTHROPIC: dict[str, SearchStrategy[object]] = {
    "messages": ANTHROPIC_MESSAGES,
    "system": TEXTS | BLOCKS,
    "tools": ANTHROPIC_TOOLS,
    "tool_choice": st.fixed_dictionaries(
        {"type": st.sampled_from(["auto", "any", "tool", "none", "other"])},
        optional={"name": TOOL_NAMES, "disable_parallel_tool_use": st.booleans()},
    ),
    "thinking": st.fixed_dictionaries(
        {"type": st.sampled_from(["enabled", "disabled", "adaptive"])},
        optional={"budget_tokens": st.integers(0, 2000)},
    ),
    "output_config": st.fixed_dictionaries(
        {},
        optional={
            "effort": st.sampled_from(["low", "max", "huge"]),
            "format": st.builds(lambda s: {"type": "json_schema", "schema": s}, VALUES),
        },
    ),
    "stop_sequences": st.lists(TEXTS, max_size=3),
}
SCORED = TEXTS | st.lists(TEXTS | st.builds(lambda text: {"text": text}, TEXTS), max_size=3)
LIKELY: dict[str, SearchStrategy[object]] = {
    "prompt": PROMPTS | st.lists(PROMPTS, max_size=2),
    "messages": MESSAGES,
    "previous_response_id": TEXTS,
    "background": st.booleans(),
    "include": st.just(["message.output_text.logprobs"]),
    "text": st.fixed_dictionaries({}, optional={"format": VALUES | st.just({"type": "text"})}),
    "model": st.sampled_from(["base/model", "alias", "nobody", "alias:x", ""]),
    "lora_name": TEXTS,
    "lora_path": st.sampled_from(["/nowhere", "", "/etc/passwd", "\0", "../x"]),
    "tokens": st.lists(st.integers(-1, 270), max_size=5),
    "stop": TEXTS | st.lists(TEXTS, max_size=3),
    "logit_bias": st.dictionaries(st.integers(-1, 270).map(str), st.floats(-101, 101)),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
    "n": st.integers(0, 4),
    "max_tokens": st.integers(-1, 600),
    "logprobs": st.booleans() | st.integers(-1, 21),
    "top_logprobs": st.integers(-1, 21),
    "logprob_token_ids": st.lists(st.integers(-1, 270), max_size=5),
    "allowed_token_ids": st.lists(st.integers(-1, 270), max_size=5),
    "bad_words": TEXTS | st.lists(TEXTS, max_size=3),
    "prompt_logprob_start": st.integers(-1, 9),
    "prompt_logprobs_last_n": st.integers(-1, 9),
    "tools": TOOLS,
    "tool_choice": st.sampled_from(["none", "auto", "required", "other"])
    | st.builds(lambda name: {"type": "function", "function": {"name": name}}, TOOL_NAMES),
    "parallel_tool_calls": st.booleans(),
    "reasoning_effort": st.sampled_from(["none", "high", "huge"]),
    "input": PROMPTS | st.lists(PROMPTS, max_size=2) | ITEMS,
    "dimensions": st.integers(-1, 9),
    "task": st.sampled_from(["embed", "token_embed", "classify"]),
    **dict.fromkeys(
        ("query", "queries", "documents", "items", "text_1", "text_2", "data_1", "data_2"),
        SCORED,
    ),
    "max_tokens_per_query": st.integers(-1, 9),
    "max_tokens_per_doc": st.integers(-1, 9),
    "top_n": st.integers(-1, 9),
    "encoding_format": st.sampled_from(["float", "base64", "bytes"]),
    "prompt_embeds": TEXTS | st.just("AAAA"),
    "input_ids": st.lists(st.integers(-1, 270), max_size=5),
    "return_logprob": st.booleans(),
    "logprob_start_len": st.integers(-1, 9),
    "top_logprobs_num": st.integers(-1, 21),
}


def bodies(route: Operation) -> SearchStrategy[dict[str, object]]:
    """What the example has, some of what the route knows, and up to two fields of any kind."""
    assert route.body is not None
    fields = list(route.body.model_fields)
    known = LIKELY
    if route.path.startswith("/v1/messages"):
        known = {**LIKELY, **ANTHROPIC}
    elif route.body is InvocationBody:
        fields = list({**EmbeddingBody.model_fields, **CompletionBody.model_fields, "messages": 0})
    elif route.path.endswith("/batch"):
        known = {**LIKELY, "messages": st.lists(MESSAGES, max_size=2)}
    likely = {name: known[name] for name in fields if name in known}
    needed = {
        name: likely.pop(name, VALUES) | st.just(value) for name, value in route.example.items()
    }
    sound = st.fixed_dictionaries(needed, optional=likely)
    names = st.sampled_from(fields) | TEXTS if fields else TEXTS
    odd = st.dictionaries(names, VALUES, max_size=2)
    return st.builds(lambda sound, odd: {**sound, **odd}, sound, odd)


URLS = st.sampled_from(list(ROUTES))
REQUESTS = st.one_of(
    *(st.tuples(st.just(url), bodies(route)) for url, route in ROUTES.items()),
    st.tuples(URLS, VALUES),
)


def check(response: httpx.Response) -> None:
    if response.status_code != 200:
        assert response.status_code in (400, 404, 413)
        error = error_of(response, response.status_code)
        assert error["message"]
        assert len(error["message"]) < 3000


@pytest.fixture(scope="module")
def apps() -> list[FastAPI]:
    """One app that refuses unknown fields; one that ignores them and takes embeddings."""
    return [
        create_app(
            FakeEngine(fake_config(enable_prompt_embeds=is_lax)),
            ServerConfig(ignore_unknown_fields=is_lax, max_body_bytes=10_000),
        )
        for is_lax in (False, True)
    ]


def in_memory(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


async def post(app: FastAPI, url: str, content: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    async with in_memory(app) as client:
        check(await client.post(url, content=content, headers=headers))


fuzz = settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@fuzz
@given(request=REQUESTS)
async def test_no_body_of_json_is_a_500(apps: list[FastAPI], request: tuple[str, object]) -> None:
    url, body = request
    for app in apps:
        await post(app, url, json.dumps(body).encode())


@fuzz
@given(
    url=URLS,
    content=st.binary(max_size=60) | st.text('{}[]",:ab\\ud80019-+.eE\x00\n ').map(str.encode),
)
async def test_no_bytes_are_a_500(apps: list[FastAPI], url: str, content: bytes) -> None:
    await post(apps[1], url, content)


@fuzz
@given(
    path=st.text(st.characters(min_codepoint=36, max_codepoint=126), max_size=30),
    method=st.sampled_from(["GET", "POST", "PUT", "HEAD", "OPTIONS", "BREW"]),
)
async def test_no_path_is_a_500(apps: list[FastAPI], path: str, method: str) -> None:
    async with in_memory(apps[0]) as client:
        url = httpx.URL("http://localhost", raw_path=b"/" + path.encode())
        assert (await client.request(method, url)).status_code < 500
