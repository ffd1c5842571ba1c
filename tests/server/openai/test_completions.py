from __future__ import annotations

import json
import threading
from pathlib import Path

import httpx
import msgspec
import pytest

from lora_serve.config import ServerConfig
from lora_serve.server.http.streaming import event
from lora_serve.server.openai import completions
from tests.fakes.engine import FakeEngine, fake_config, logprob_of, write_adapter
from tests.fakes.tokenizer import BOS, ByteTokenizer
from tests.server.clients import client_for, error_of, events, joined

URL = "/v1/completions"


async def complete(client: httpx.AsyncClient, **body: object) -> dict:
    response = await client.post(URL, json={"max_tokens": 100, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def stream(client: httpx.AsyncClient, **body: object) -> list[dict]:
    response = await client.post(URL, json={"max_tokens": 100, "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


async def test_a_text_is_continued(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt="hi")
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "base/model"
    assert answer["system_fingerprint"] == "ab" * 6
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "You said: hi #0",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "prompt_logprobs": None,
            "token_ids": None,
            "prompt_token_ids": None,
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 15,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ([104, 105], ["You said: hi #0"]),
        (["a", "b"], ["You said: a #0", "You said: b #0"]),
        ([[97], [98, 99]], ["You said: a #0", "You said: bc #0"]),
        (["a", [98]], ["You said: a #0", "You said: b #0"]),
    ],
)
async def test_prompts_come_as_ids_and_in_lists(
    client: httpx.AsyncClient, prompt: object, texts: list[str]
) -> None:
    answer = await complete(client, prompt=prompt)
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))


async def test_every_prompt_has_n_choices_with_indices_of_their_own(
    client: httpx.AsyncClient,
) -> None:
    answer = await complete(client, prompt=["a", "b"], n=2)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "You said: a #0"),
        (1, "You said: a #1"),
        (2, "You said: b #0"),
        (3, "You said: b #1"),
    ]
    assert answer["usage"]["prompt_tokens"] == 4


async def test_the_prompts_of_a_body_ask_for_admission_together(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    await complete(client, prompt=[[5] * 40, [6] * 20], n=3, max_tokens=1)
    assert len(engine.groups) == 2
    (group,) = set(engine.groups)
    assert (group.num_requests, group.num_tokens) == (6, 180)


async def test_cached_tokens_are_summed_over_prompts(client: httpx.AsyncClient) -> None:
    prompts = ["x" * 40, "y" * 20]
    first = await complete(client, prompt=prompts)
    again = await complete(client, prompt=prompts)
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 32 + 16}


async def test_a_streamed_answer_is_the_whole_answer_in_pieces(client: httpx.AsyncClient) -> None:
    body = {"prompt": ["hé", "yo"], "n": 2, "logprobs": 3, "echo": True, "return_token_ids": True}
    whole = await complete(client, **body)
    chunks = await stream(client, **body, stream_options={"include_usage": True})
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}
    for choice in whole["choices"]:
        pieces = [
            piece
            for chunk in chunks
            for piece in chunk["choices"]
            if piece["index"] == choice["index"]
        ]
        assert "".join(piece["text"] for piece in pieces) == choice["text"]
        assert joined(piece["token_ids"] for piece in pieces) == choice["token_ids"]
        for name, values in choice["logprobs"].items():
            assert joined(piece["logprobs"][name] for piece in pieces) == values
        assert [piece["finish_reason"] for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert pieces[-1]["finish_reason"] == choice["finish_reason"]
        assert pieces[0]["prompt_token_ids"] == choice["prompt_token_ids"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_half_a_character_makes_no_chunk(client: httpx.AsyncClient) -> None:
    chunks = await stream(client, prompt="é")
    assert [chunk["choices"][0]["text"] for chunk in chunks] == list("You said: é #0")


async def test_a_stream_has_no_usage_unless_asked(client: httpx.AsyncClient) -> None:
    assert all("usage" not in chunk for chunk in await stream(client, prompt="a"))


async def test_usage_can_come_with_every_chunk(client: httpx.AsyncClient) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await stream(client, prompt="a", max_tokens=3, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [1, 2, 3, 3]


async def test_logprobs_keep_every_bit(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt="hi", max_tokens=2, logprobs=1)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["Y", "o"]
    assert logprobs["token_logprobs"] == [logprob_of(0, ord("Y")), logprob_of(1, ord("o"))]
    assert logprobs["top_logprobs"][0]["Y"] == logprob_of(0, ord("Y"))
    assert len(logprobs["top_logprobs"][0]) == 2
    assert logprobs["text_offset"] == [0, 1]


async def test_an_echo_shows_the_prompt_and_its_logprobs_from_the_second_token_on(
    client: httpx.AsyncClient,
) -> None:
    answer = await complete(client, prompt=[104, 105], max_tokens=1, echo=True, logprobs=0)
    choice = answer["choices"][0]
    assert choice["text"] == "hiY"
    assert choice["logprobs"]["tokens"] == ["h", "i", "Y"]
    assert choice["logprobs"]["token_logprobs"] == [
        None,
        logprob_of(1, ord("i")),
        logprob_of(0, ord("Y")),
    ]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


@pytest.mark.parametrize("url", [URL, "/v1/chat/completions"])
async def test_max_n_says_how_many_choices_may_be_asked_for(url: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]} if "chat" in url else {"prompt": "a"}
    async with client_for(FakeEngine(fake_config(max_n=3))) as client:
        answer = await client.post(url, json={**body, "max_tokens": 1, "n": 3})
        assert len(answer.json()["choices"]) == 3
        error = error_of(await client.post(url, json={**body, "max_tokens": 1, "n": 4}), 400)
    assert error["message"] == "n 4 is above --max-n 3; ask for fewer choices, or raise the limit"
    assert error["param"] == "n"


async def test_a_large_event_is_encoded_beside_the_event_loop(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def noting_event(body: msgspec.Struct) -> bytes:
        threads.append(threading.current_thread())
        return event(body)

    monkeypatch.setattr(completions, "event", noting_event)
    async with client_for(engine) as client:
        asked = {"prompt": [97] * 300, "echo": True, "logprobs": 2}
        assert len(await stream(client, **asked)) == len(threads)
    main = threading.main_thread()
    assert threads[0] is not main
    assert all(thread is main for thread in threads[1:])


async def test_an_echo_alone_costs_no_tokens(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt=[104, 105], max_tokens=0, echo=True, logprobs=0)
    choice = answer["choices"][0]
    assert choice["text"] == "hi"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"] == [None, logprob_of(1, ord("i"))]
    assert answer["usage"]["completion_tokens"] == 0


async def test_a_prompt_logprob_that_was_not_asked_for_is_null(client: httpx.AsyncClient) -> None:
    asked = {"prompt": "keeper", "prompt_logprobs": 0, "max_tokens": 1}
    (whole,) = (await complete(client, **asked))["choices"]
    (part,) = (await complete(client, **asked, prompt_logprob_start=3))["choices"]
    assert part["prompt_logprobs"] == [None] * 4 + whole["prompt_logprobs"][4:]
    echoed = await complete(client, prompt="keeper", echo=True, logprobs=0, prompt_logprob_start=3)
    logprobs = echoed["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][:4] == logprobs["top_logprobs"][:4] == [None] * 4
    assert None not in logprobs["token_logprobs"][4:]


async def test_prompt_logprobs_are_listed_by_token_id(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt=[104, 105], prompt_logprobs=1)
    first, second = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second["105"] == {
        "logprob": logprob_of(1, 105),
        "rank": 21,
        "decoded_token": "i",
    }
    assert len(second) == 2


async def test_token_ids_come_on_request(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt="h", max_tokens=2, return_token_ids=True)
    assert answer["choices"][0]["prompt_token_ids"] == [BOS, ord("h")]
    assert answer["choices"][0]["token_ids"] == list(b"Yo")


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, [100, 101]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, [100, 101]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, [BOS, 97]),
        ({"truncate_prompt_tokens": 200}, [BOS, 97, 98, 99, 100, 101]),
        ({"truncate_prompt_tokens": None}, [BOS, 97, 98, 99, 100, 101]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 508}, [98, 99, 100, 101]),
        ({"truncate_prompt_tokens": -1, "max_tokens": 1}, [BOS, 97, 98, 99, 100, 101]),
    ],
)
async def test_a_prompt_is_cut_to_the_tokens_that_are_asked_for(
    client: httpx.AsyncClient, asked: dict, kept: list[int]
) -> None:
    answer = await complete(client, prompt="abcde", return_token_ids=True, echo=True, **asked)
    (choice,) = answer["choices"]
    assert choice["prompt_token_ids"] == kept
    assert answer["usage"]["prompt_tokens"] == len(kept)
    shown = "".join(chr(token_id) for token_id in kept if token_id != BOS)
    assert choice["text"].removeprefix("<bos>").startswith(shown + "Y")


@pytest.mark.parametrize("by_flag", [True, False])
async def test_logprobs_name_tokens_by_their_ids_on_request(
    engine: FakeEngine, by_flag: bool
) -> None:
    config = ServerConfig(return_tokens_as_token_ids=by_flag)
    body = {} if by_flag else {"return_tokens_as_token_ids": True}
    async with client_for(engine, config) as client:
        answer = await complete(client, prompt="h", logprobs=1, max_tokens=2, **body)
        body = {"prompt": "h", "return_tokens_as_token_ids": False, "logprobs": 1}
        plain = await complete(client, **body, max_tokens=2)
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:89", "token_id:111"]
    assert set(logprobs["top_logprobs"][0]) == {"token_id:89", "token_id:116"}
    assert plain["choices"][0]["logprobs"]["tokens"] == ["Y", "o"]
    for name in ("token_logprobs", "text_offset"):
        assert logprobs[name] == plain["choices"][0]["logprobs"][name]


async def test_an_answer_says_how_long_it_took_if_the_server_is_to_tell(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    assert (await complete(client, prompt="h"))["metrics"] is None
    options = {"include_usage": True}
    async with client_for(engine, ServerConfig(enable_per_request_metrics=True)) as client:
        whole = await complete(client, prompt="h", max_tokens=5)
        chunks = await stream(client, prompt="h", max_tokens=5, stream_options=options)
        several = await complete(client, prompt="h", n=2)
    assert whole["metrics"] == chunks[-1]["metrics"]
    assert whole["metrics"] == {
        "time_to_first_token_ms": 500.0,
        "generation_time_ms": 2000.0,
        "queue_time_ms": 500.0,
        "mean_itl_ms": 500.0,
        "tokens_per_second": 2.0,
    }
    assert {json.dumps(chunk["metrics"]) for chunk in chunks[:-1]} == {"null"}
    assert several["metrics"] is None


async def test_the_server_may_tell_the_usage_in_every_chunk(engine: FakeEngine) -> None:
    async with client_for(engine, ServerConfig(enable_force_include_usage=True)) as client:
        chunks = await stream(client, prompt="hi")
    assert chunks[-1]["choices"] == []
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [*range(1, 16), 15]


async def test_special_tokens_are_added_unless_told_not_to(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt="h", add_special_tokens=False)
    assert answer["usage"]["prompt_tokens"] == 1


async def test_a_stop_string_is_told_as_the_reason(client: httpx.AsyncClient) -> None:
    answer = await complete(client, prompt="hi", stop="said")
    assert answer["choices"][0]["text"] == "You "
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["stop_reason"] == "said"


async def test_sixteen_tokens_are_the_default(client: httpx.AsyncClient) -> None:
    for body in ({"prompt": "x" * 30}, {"prompt": "x" * 30, "max_tokens": None}):
        answer = (await client.post(URL, json=body)).json()
        assert answer["usage"]["completion_tokens"] == 16
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_an_adapter_answers_under_its_name_and_is_told_by_version(
    engine: FakeEngine, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    info = await engine.load_lora_adapter("tenant", write_adapter(tmp_path, "ALPHA"))
    for model in ("tenant", "base/model:tenant", "alias:tenant"):
        answer = await complete(client, model=model, prompt="hi")
        assert answer["choices"][0]["text"] == "ALPHA: You said: hi #0"
        assert answer["model"] == model
        assert answer["system_fingerprint"] == f"{'ab' * 6}-{info.digest[:12]}-g0"
        chunks = await stream(client, model=model, prompt="hi")
        assert {chunk["system_fingerprint"] for chunk in chunks} == {answer["system_fingerprint"]}


@pytest.mark.parametrize("model", ["nobody", "base/model:", "base/model:nobody", ""])
async def test_an_unknown_model_is_a_404(client: httpx.AsyncClient, model: str) -> None:
    for body in ({"prompt": "hi"}, {"prompt": ["a", "b"]}, {"prompt": "hi", "stream": True}):
        error = error_of(await client.post(URL, json={"model": model, **body}), 404)
        assert error["message"].startswith(f"The model `{model}` does not exist.")
        assert error["type"] == "NotFoundError"
        assert error["param"] == "model"


async def test_without_lora_an_adapters_name_is_unknown_at_once() -> None:
    engine = FakeEngine(fake_config(enable_lora=False))
    async with client_for(engine) as client:
        error_of(await client.post(URL, json={"model": "tenant", "prompt": "hi"}), 404)
    assert engine.seen == []


async def test_the_engine_gets_the_settings_as_they_were_asked_for(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    settings = {
        "max_tokens": 7,
        "min_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
        "seed": -7,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    body = {
        "prompt": "hi",
        "stop": ["§", "$"],
        "stop_token_ids": [5, 6],
        "logit_bias": {"7": -1.5, "8": 2},
        "priority": -3,
        "cache_salt": "pa/per@\\x",
        **settings,
    }
    await complete(client, **body)
    (request,) = engine.seen
    params = request.params
    assert {name: getattr(params, name) for name in settings} == settings
    assert params.stop == ("§", "$")
    assert params.stop_token_ids == (5, 6)
    assert params.logit_bias == {7: -1.5, 8: 2.0}
    assert request.priority == -3
    assert request.cache_salt == "pa/per@\\x"


async def test_the_models_own_settings_are_the_defaults() -> None:
    tokenizer = ByteTokenizer({"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.1})
    for mode, expected in (("auto", (0.7, 20, 1.1)), ("none", (1.0, 0, 1.0))):
        engine = FakeEngine(fake_config(generation_config=mode), tokenizer)
        async with client_for(engine) as client:
            await complete(client, prompt="hi")
            await complete(client, prompt="hi", temperature=0.0)
        first, second = (request.params for request in engine.seen)
        assert (first.temperature, first.top_k, first.repetition_penalty) == expected
        assert second.temperature == 0.0


async def test_the_clients_own_id_is_kept_and_may_repeat(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    for _ in range(2):
        answer = await complete(client, prompt="hi", request_id="mine")
        assert answer["id"] == "cmpl-mine"
    header = await client.post(URL, json={"prompt": "hi"}, headers={"X-Request-Id": "other"})
    assert header.json()["id"] == "cmpl-other"
    assert len({request.request_id for request in engine.seen}) == 3


async def test_what_openai_clients_send_for_others_sake_is_taken(client: httpx.AsyncClient) -> None:
    await complete(
        client,
        prompt="hi",
        user="me",
        suffix=None,
        best_of=1,
        metadata={"a": "b"},
        store=False,
        verbosity="low",
        prediction={"type": "content", "content": "You said"},
    )


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("use_beam_search", [None, False]),
        ("early_stopping", [None, False]),
        ("length_penalty", [None, 1, 1.0]),
        ("stream_interval", [None, 1]),
        ("repetition_detection", [None, {}]),
        ("vllm_xargs", [None, {}]),
        ("thinking_token_budget", [None, -1]),
        ("watermarking", [None, False]),
        ("routed_experts_prompt_start", [None, 0]),
        ("return_token_offsets", [None, False]),
        ("mm_payload", [None, "tensors"]),
        ("suffix", [None, ""]),
        ("stream_options", [None, {}]),
        ("session_id", [None, "s"]),
        ("kv_transfer_params", [None, {}, {"do_remote_decode": False, "remote_host": "x"}]),
        ("spaces_between_special_tokens", [None, True, False]),
    ],
)
async def test_a_value_that_asks_for_nothing_is_taken(
    client: httpx.AsyncClient, field: str, values: list[object]
) -> None:
    plain = (await complete(client, prompt="hi"))["choices"]
    for value in values:
        assert (await complete(client, prompt="hi", **{field: value}))["choices"] == plain


async def test_logprobs_may_be_true_for_one_and_false_for_none(client: httpx.AsyncClient) -> None:
    asked = [(await complete(client, prompt="h", logprobs=n))["choices"] for n in (1, True)]
    assert asked[0] == asked[1]
    assert asked[0][0]["logprobs"] is not None
    assert (await complete(client, prompt="h", logprobs=False))["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "prompt", "must be provided"),
        ({"prompt": []}, "prompt", "must be provided"),
        ({"prompt": [[]]}, "prompt", "must be provided"),
        ({"prompt": "", "add_special_tokens": False}, "prompt", "must be provided"),
        ({"prompt": [1000]}, "prompt", "out of vocabulary"),
        ({"prompt": [-1]}, "prompt", "token id"),
        ({"prompt": ["a"] * 1025}, "prompt", "at most 1024 prompts"),
        ({"prompt": ["a"] * 100, "n": 100}, "prompt", "4096 choices"),
        ({"prompt": "x" * 600}, "prompt", "512 tokens"),
        ({"prompt": "x" * 600_000}, "prompt", "600000 characters"),
        ({"prompt": "a", "n": 0}, "n", "n must be in [1, 128]"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens", "max_tokens must be in"),
        ({"prompt": "a", "max_tokens": 5, "min_tokens": 6}, "min_tokens", "above max_tokens 5"),
        ({"prompt": "a", "temperature": 2.5}, "temperature", "must be in [0.0, 2.0], got 2.5"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "[0, 20]"),
        ({"prompt": "a", "best_of": 3}, "best_of", "must equal n 1"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
        (
            {"prompt": "a", "response_format": {"type": "json"}},
            "response_format",
            "whose `type` is",
        ),
        (
            {"prompt": "a", "stream_options": {"include_usage": True}},
            "stream_options",
            "needs stream",
        ),
        (
            {"prompt": "a", "stream_options": {"include_usage": False}},
            "stream_options",
            "needs stream",
        ),
        (
            {"prompt": "a", "kv_transfer_params": {"do_remote_decode": True}},
            "kv_transfer_params",
            "no KV tier that another one looks into",
        ),
        (
            {"prompt": "a", "kv_transfer_params": {"do_remote_prefill": "yes"}},
            "kv_transfer_params",
            "must be true or false",
        ),
        (
            {
                "prompt": "a",
                "kv_transfer_params": {"do_remote_prefill": True, "do_remote_decode": True},
            },
            "kv_transfer_params",
            "a request is one of both",
        ),
        ({"prompt": "a", "kv_transfer_params": [1]}, "kv_transfer_params", "must be an object"),
        ({"prompt": "a", "prompt_logprob_start": 1}, "prompt_logprob_start", "needs prompt_logpro"),
        ({"prompt": "a", "use_beam_search": True}, "use_beam_search", "not supported"),
        ({"prompt": "a", "thinking_token_budget": 5}, "thinking_token_budget", "one token each"),
        ({"prompt": "a", "thinking_token_budget": -2}, "thinking_token_budget", "at least -1"),
        ({"prompt": "a", "watermarking": True}, "watermarking", "not supported"),
        ({"prompt": "a", "length_penalty": 0.5}, "length_penalty", "not supported"),
        ({"prompt": "a", "logprobs": "1"}, "logprobs", "must be an integer"),
        ({"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "[1, 512]"),
        ({"prompt": "a", "truncate_prompt_tokens": 513}, "truncate_prompt_tokens", "got 513"),
        ({"prompt": "a", "truncation_side": "up"}, "truncation_side", "'left' or 'right'"),
        ({"prompt": "a", "stream": True, "prompt_logprobs": 1}, "prompt_logprobs", "stream"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt", "non-empty"),
        ({"prompt": "a", "cache_salt": "s" * 1025}, "cache_salt", "at most 1024"),
        ({"prompt": "a", "stop": ["x"] * 17}, "stop", "at most 16"),
        ({"prompt": "a", "request_id": "x" * 257}, "request_id", "256"),
    ],
)
async def test_what_can_never_succeed_is_a_400_that_names_the_field(
    client: httpx.AsyncClient, body: dict, param: str, words: str
) -> None:
    error = error_of(await client.post(URL, json=body), 400)
    assert words in error["message"]
    assert error["param"] == param
    assert error["type"] == "BadRequestError"


async def test_a_request_id_header_is_bounded_too(client: httpx.AsyncClient) -> None:
    headers = {"X-Request-Id": "x" * 257}
    response = await client.post(URL, json={"prompt": "a"}, headers=headers)
    assert error_of(response, 400)["param"] == "X-Request-Id"


async def test_one_bad_prompt_refuses_the_whole_body_and_leaves_nothing_running(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    for is_stream in (False, True):
        body = {"prompt": ["ok", [999]], "stream": is_stream}
        error_of(await client.post(URL, json=body), 400)
        assert engine.growing == set()


async def test_embeddings_need_their_flag(client: httpx.AsyncClient) -> None:
    error = error_of(await client.post(URL, json={"prompt_embeds": "AAAA"}), 400)
    assert error["message"] == "You must set `--enable-prompt-embeds` to input `prompt_embeds`."
    await complete(client, prompt="hi", prompt_embeds=[])
