from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from lora_serve.config import ServerConfig
from lora_serve.errors import ConfigError
from lora_serve.server.app import create_app
from tests.fakes.engine import FakeEngine, logprob_of
from tests.fakes.tokenizer import TURN, ByteTokenizer
from tests.server.clients import client_for, error_of, events, joined

URL = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]


async def chat(client: httpx.AsyncClient, **body: object) -> dict:
    response = await client.post(URL, json={"messages": HELLO, **body})
    assert response.status_code == 200, response.text
    return response.json()


def prompt_text(engine: FakeEngine) -> str:
    return engine.tokenizer.decode(engine.seen[-1].prompt.token_ids, skip_special_tokens=False)


async def test_a_conversation_is_continued(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    answer = await chat(client)
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "You said: user\nhiassistant\n #0",
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
            },
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": None,
        }
    ]
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert prompt_text(engine) == "<turn>user\nhi<turn>assistant\n"


async def test_without_a_limit_the_answer_may_fill_the_context(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    answer = await chat(client)
    expected = engine.model_info.max_model_len - answer["usage"]["prompt_tokens"]
    assert engine.seen[0].params.max_tokens == expected


@pytest.mark.parametrize(("own_default", "expected"), [(20, 20), (10_000, 493)])
async def test_the_models_own_limit_is_the_default_as_far_as_it_fits(
    own_default: int, expected: int
) -> None:
    engine = FakeEngine(tokenizer=ByteTokenizer({"max_tokens": own_default}))
    async with client_for(engine) as client:
        await chat(client)
        await chat(client, max_tokens=30)
    limits = [request.params.max_tokens for request in engine.seen]
    assert limits == [expected, 30]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_tokens": 4}, 4),
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 4, "max_completion_tokens": 5}, 5),
    ],
)
async def test_both_names_of_the_limit_are_known(
    client: httpx.AsyncClient, limits: dict, expected: int
) -> None:
    answer = await chat(client, **limits)
    assert answer["usage"]["completion_tokens"] == expected


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("limit", [-1, 10_000])
async def test_a_limit_out_of_range_is_refused_by_the_name_that_was_sent(
    client: httpx.AsyncClient, name: str, limit: int
) -> None:
    error = error_of(await client.post(URL, json={"messages": HELLO, name: limit}), 400)
    assert error["param"] == name
    assert f"{name} " in error["message"]


async def test_a_conversation_that_is_too_long_is_told_of_its_messages(
    client: httpx.AsyncClient,
) -> None:
    long = [{"role": "user", "content": "x" * 600}]
    chat_error = error_of(await client.post(URL, json={"messages": long, "max_tokens": 1}), 400)
    assert chat_error["param"] == "messages"
    told = await client.post("/v1/responses", json={"input": long, "max_output_tokens": 1})
    assert error_of(told, 400)["param"] == "input"


async def test_a_stream_begins_with_the_role_and_ends_with_the_reason(
    client: httpx.AsyncClient,
) -> None:
    body = {"messages": HELLO, "stream": True, "max_tokens": 3, "n": 2}
    response = await client.post(URL, json={**body, "stream_options": {"include_usage": True}})
    chunks = events(response.text)
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for index in range(2):
        pieces = [
            piece for chunk in chunks for piece in chunk["choices"] if piece["index"] == index
        ]
        assert pieces[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(piece["delta"]["content"] for piece in pieces) == "You"
        assert [piece["finish_reason"] for piece in pieces] == [None, None, None, "length"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 6
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_a_streamed_answer_is_the_whole_answer_in_pieces(client: httpx.AsyncClient) -> None:
    body = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    whole = await chat(client, **body)
    response = await client.post(URL, json={"messages": HELLO, "stream": True, **body})
    chunks = events(response.text)
    pieces = [chunk["choices"][0] for chunk in chunks]
    choice = whole["choices"][0]
    text = "".join(piece["delta"]["content"] for piece in pieces)
    assert text == choice["message"]["content"]
    logprobs = joined(p["logprobs"]["content"] for p in pieces[1:])
    assert logprobs == choice["logprobs"]["content"]
    assert "token_ids" not in pieces[0]
    assert joined(p["token_ids"] for p in pieces[1:]) == choice["token_ids"]
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert whole["prompt_token_ids"][0] == TURN


async def test_half_a_character_makes_no_chunk(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "\U0001f600"}]
    response = await client.post(URL, json={"messages": messages, "stream": True})
    texts = [chunk["choices"][0]["delta"]["content"] for chunk in events(response.text)[1:]]
    assert texts == list("You said: user\n\U0001f600assistant\n #0")


async def test_logprobs_have_token_bytes_and_alternatives(client: httpx.AsyncClient) -> None:
    answer = await chat(client, logprobs=True, top_logprobs=2, max_tokens=1)
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    assert entry["token"] == "Y"
    assert entry["logprob"] == logprob_of(0, ord("Y"))
    assert entry["bytes"] == [ord("Y")]
    assert [top["token"] for top in entry["top_logprobs"]] == ["t", "s"]


async def test_logprobs_alone_give_no_alternatives(client: httpx.AsyncClient) -> None:
    answer = await chat(client, logprobs=True, max_tokens=1)
    assert answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_prompt_logprobs_stand_beside_the_choices(client: httpx.AsyncClient) -> None:
    answer = await chat(client, prompt_logprobs=0, max_tokens=1)
    assert answer["prompt_logprobs"][0] is None
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]


async def test_text_parts_are_one_text(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    parts = [
        {"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}},
        "two",
        {"type": "input_text", "text": "three", "annotations": None},
        {"type": "output_text", "text": "four"},
        {"type": "refusal", "refusal": "five"},
    ]
    await chat(client, messages=[{"role": "user", "content": parts}])
    assert prompt_text(engine) == "<turn>user\none\ntwo\nthree\nfour\nfive<turn>assistant\n"


async def test_unknown_fields_of_parts_are_ignored_with_those_of_bodies(
    engine: FakeEngine,
) -> None:
    part = {"type": "text", "text": "one", "unheard_of": {"type": "ephemeral"}}
    async with client_for(engine, ServerConfig(ignore_unknown_fields=True)) as client:
        await chat(client, messages=[{"role": "user", "content": [part]}], unheard_of=1)
        refused = {"messages": HELLO, "use_beam_search": True}
        error = error_of(await client.post(URL, json=refused), 400)
    assert prompt_text(engine) == "<turn>user\none<turn>assistant\n"
    assert error["param"] == "use_beam_search"


async def test_the_chunk_that_tells_the_role_counts_no_token(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"messages": HELLO, "stream": True, "stream_options": options}
    chunks = events((await client.post(URL, json=body)).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts[:3] == [0, 1, 2]
    assert chunks[0]["usage"]["prompt_tokens"] == chunks[-1]["usage"]["prompt_tokens"]


async def test_a_requests_own_template_needs_the_servers_trust(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    render, trusted = engine.tokenizer.render_chat, []

    def noting_render(*args: Any, trusts_template: bool, **given: Any) -> str:
        trusted.append(trusts_template)
        return render(*args, **given)

    monkeypatch.setattr(engine.tokenizer, "render_chat", noting_render)
    async with client_for(engine, ServerConfig(trust_request_chat_template=True)) as client:
        await chat(client, chat_template="MINE")
        too_long = {"messages": HELLO, "chat_template": "x" * 65_537}
        assert "65536" in error_of(await client.post(URL, json=too_long), 400)["message"]
    assert prompt_text(engine).startswith("MINE<turn>user")
    async with client_for(engine) as client:
        await chat(client, chat_template=None)
        response = await client.post(URL, json={"messages": HELLO, "chat_template": "MINE"})
    error = error_of(response, 400)
    assert error["param"] == "chat_template"
    assert "--trust-request-chat-template" in error["message"]
    assert trusted == [False, True]


async def test_a_conversation_is_cut_to_the_tokens_that_are_asked_for(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    await chat(client, truncate_prompt_tokens=3)
    assert prompt_text(engine) == "nt\n"


async def test_logprobs_name_tokens_by_their_ids_on_request(client: httpx.AsyncClient) -> None:
    body = {"logprobs": True, "top_logprobs": 1, "max_tokens": 1}
    answer = await chat(client, **body, return_tokens_as_token_ids=True)
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["bytes"]) == ("token_id:89", [89])
    assert entry["top_logprobs"][0]["token"] == "token_id:116"


async def test_an_answer_says_how_long_it_took_if_the_server_is_to_tell(
    engine: FakeEngine,
) -> None:
    body = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    async with client_for(engine, ServerConfig(enable_per_request_metrics=True)) as client:
        whole = await chat(client)
        chunks = events((await client.post(URL, json=body)).text)
    assert whole["metrics"]["queue_time_ms"] == 500.0
    assert chunks[-1]["metrics"] == whole["metrics"]
    assert not any("metrics" in chunk for chunk in chunks[:-1])


async def test_a_conversation_that_another_server_wrote_is_continued_as_it_was_written(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    """Disaggregated servers forward the prompt's tokens, so that it is tokenized once."""
    await chat(client, messages=HELLO, max_tokens=2)
    written = list(engine.seen[-1].prompt.token_ids)
    other = [{"role": "user", "content": "something else"}]
    given = {"kv_transfer_params": {"prompt_token_ids": written}}
    answer = await chat(client, messages=other, max_tokens=2, return_token_ids=True, **given)
    assert answer["prompt_token_ids"] == written
    await chat(client, messages=other, max_tokens=2, echo=True, **given)
    assert list(engine.seen[-1].prompt.token_ids) != written


@pytest.mark.parametrize(
    ("token_ids", "words"),
    [
        ([], "leave it out"),
        (["a"], "list of token ids"),
        ([260], "out of vocabulary"),
        ("a", "list"),
    ],
)
async def test_tokens_of_another_server_are_checked(
    client: httpx.AsyncClient, token_ids: object, words: str
) -> None:
    body = {"messages": HELLO, "kv_transfer_params": {"prompt_token_ids": token_ids}}
    error = error_of(await client.post(URL, json=body), 400)
    assert words in error["message"]
    assert error["param"] == "kv_transfer_params"


async def test_the_last_message_can_be_continued_and_echoed(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Well, "}]
    answer = await chat(
        client, messages=messages, continue_final_message=True, echo=True, max_tokens=3
    )
    assert prompt_text(engine) == "<turn>user\nhi<turn>assistant\nWell, "
    assert answer["choices"][0]["message"]["content"] == "Well, You"


async def test_an_answer_can_be_sent_back_as_the_client_got_it(client: httpx.AsyncClient) -> None:
    answered = {
        "role": "assistant",
        "content": "yes",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    await chat(
        client,
        messages=[*HELLO, answered, *HELLO],
        tools=[],
        tool_choice="none",
        modalities=["text"],
    )


async def test_a_template_file_takes_the_place_of_the_tokenizers_own(
    engine: FakeEngine, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("MINE")
    async with client_for(engine, ServerConfig(chat_template=str(template))) as client:
        await chat(client)
    assert prompt_text(engine).startswith("MINE<turn>user")


def test_a_template_file_that_is_not_there_stops_the_start(engine: FakeEngine) -> None:
    with pytest.raises(ConfigError, match="--chat-template /nowhere cannot be read"):
        create_app(engine, ServerConfig(chat_template="/nowhere"))


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"messages": None}, "messages", "must be a list"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "text parts"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "'image_url'; only text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages[0].content",
            "without a string in `text`",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "", "x": 1}]}]},
            "messages[0].content",
            "unknown fields ['x']",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "refusal", "text": "no"}]}]},
            "messages[0].content",
            "without a string in `refusal`",
        ),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role", "wizard"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "has no content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0]", "has no content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0]", "no content"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 50}, "top_logprobs", "top_logprobs must be in [0, "),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "top_logprobs must be in [0, "),
        ({"logprobs": 3}, "logprobs", "true or false"),
        ({"functions": [{"name": "f"}]}, "functions", "not supported"),
        ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
        ({"web_search_options": {"a": 1}}, "web_search_options", "not supported"),
        ({"response_format": {"type": "json"}}, "response_format", "must be an object whose"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "exclude each other",
        ),
        (
            {"messages": [{"role": "user", "content": "x" * 600_000}]},
            "messages",
            "600004 characters",
        ),
    ],
)
async def test_what_can_never_succeed_is_a_400_that_names_the_field(
    client: httpx.AsyncClient, body: dict, param: str, words: str
) -> None:
    error = error_of(await client.post(URL, json={"messages": HELLO, **body}), 400)
    assert words in error["message"]
    assert error["param"] == param
