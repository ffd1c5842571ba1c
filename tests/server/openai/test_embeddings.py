from __future__ import annotations

import asyncio
import base64
import math
from array import array
from itertools import pairwise
from pathlib import Path

import httpx
import openai
import pytest

from lora_serve.config import EngineConfig, SchedulerConfig, ServerConfig
from lora_serve.pooling import PoolingParams
from lora_serve.sampling_params import PROMPT_ONLY
from lora_serve.server.openai import embeddings
from lora_serve.server.openai.generation import BEGUN_AT_ONCE
from tests.fakes.engine import CREATED, FakeEngine, fake_config, write_adapter
from tests.fakes.tokenizer import BOS
from tests.server.clients import client_for, error_of, serving

URL = "/v1/embeddings"
MESSAGES = [{"role": "user", "content": "hi"}]


async def embedded(client: httpx.AsyncClient, **body: object) -> list[list[float]]:
    response = await client.post(URL, json=body)
    assert response.status_code == 200, response.text
    data = response.json()["data"]
    assert [item["index"] for item in data] == list(range(len(data)))
    return [item["embedding"] for item in data]


async def test_an_answer_has_openais_shape(client: httpx.AsyncClient) -> None:
    answer = (await client.post(URL, json={"input": "hi"})).json()
    assert answer["id"].startswith("embd-")
    assert (answer["object"], answer["model"]) == ("list", "base/model")
    assert answer["created"] > CREATED
    assert answer["system_fingerprint"] == "ab" * 6
    (item,) = answer["data"]
    assert (item["object"], len(item["embedding"])) == ("embedding", 8)
    assert math.hypot(*item["embedding"]) == pytest.approx(1.0)
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 0,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


@pytest.mark.parametrize(
    "given", ["hi", ["hi"], [BOS, 104, 105], [[BOS, 104, 105]]], ids=["text", "texts", "ids", "all"]
)
async def test_an_input_may_be_written_in_four_ways(
    engine: FakeEngine, client: httpx.AsyncClient, given: object
) -> None:
    await embedded(client, input=given)
    (request,) = engine.seen
    assert request.prompt.token_ids == (BOS, 104, 105)
    assert request.params.max_tokens == PROMPT_ONLY.max_tokens == 0


async def test_embeddings_come_in_the_order_of_the_inputs(client: httpx.AsyncClient) -> None:
    several = await embedded(client, input=["a", [98, 99], "a", "d"])
    alone = [(await embedded(client, input=given))[0] for given in ("a", [[98, 99]], "a", "d")]
    assert several == alone
    assert several[0] == several[2] != several[3]


async def test_what_asks_for_nothing_else_is_no_error(client: httpx.AsyncClient) -> None:
    plain = {"padding": "do_not_pad", "embed_dtype": "float32", "endianness": "little"}
    assert await embedded(client, input="hi", **plain) == await embedded(client, input="hi")


async def test_base64_holds_the_same_bits_as_the_numbers(client: httpx.AsyncClient) -> None:
    (numbers,) = await embedded(client, input="hi")
    (text,) = await embedded(client, input="hi", encoding_format="base64")
    assert isinstance(text, str)
    assert array("f", base64.b64decode(text)).tolist() == numbers


async def test_dimensions_and_normalisation_are_as_the_body_says(client: httpx.AsyncClient) -> None:
    (whole,) = await embedded(client, input="hi", use_activation=False)
    (part,) = await embedded(client, input="hi", dimensions=3)
    length = math.hypot(*whole[:3])
    assert part == pytest.approx([value / length for value in whole[:3]])
    assert math.hypot(*whole) != pytest.approx(1.0)


async def test_the_servers_settings_hold_where_the_body_says_nothing(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    engine.pooling_defaults = PoolingParams(pooling_type="MEAN", normalize=False, dimensions=2)
    await embedded(client, input="hi")
    await embedded(client, input="hi", use_activation=True, dimensions=5)
    assert [request.pooling for request in engine.seen] == [
        engine.pooling_defaults,
        PoolingParams(pooling_type="MEAN", normalize=True, dimensions=5),
    ]


async def test_prompts_are_cut_and_written_as_for_answers(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    for body in (
        {"input": "abc", "truncate_prompt_tokens": 2},
        {"input": "abc", "truncate_prompt_tokens": 2, "truncation_side": "right"},
        {"input": "abc", "add_special_tokens": False},
        {"input": [[97] * 600], "truncate_prompt_tokens": -1},
    ):
        await embedded(client, **body)
    seen = [request.prompt.token_ids for request in engine.seen]
    assert seen == [(98, 99), (BOS, 97), (97, 98, 99), (97,) * 512]


async def test_a_conversation_is_embedded_without_the_head_of_an_answer(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    tokens = [
        (await client.post("/tokenize", json={"messages": MESSAGES, "add_generation_prompt": adds}))
        for adds in (False, True)
    ]
    await embedded(client, messages=MESSAGES)
    await embedded(client, messages=MESSAGES, add_generation_prompt=True)
    seen = [list(request.prompt.token_ids) for request in engine.seen]
    assert seen == [response.json()["tokens"] for response in tokens]


async def test_an_adapter_embeds_by_its_name(
    engine: FakeEngine, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    await engine.load_lora_adapter("tenant", write_adapter(tmp_path / "a", "weights"))
    response = await client.post(URL, json={"model": "tenant", "input": "hi"})
    answer = response.json()
    assert answer["model"] == "tenant"
    assert answer["system_fingerprint"].startswith("ab" * 6 + "-")
    assert [answer["data"][0]["embedding"]] != await embedded(client, input="hi")
    error_of(await client.post(URL, json={"model": "nobody", "input": "hi"}), 404)


async def test_salts_priorities_and_groups_reach_the_engine(tmp_path: Path) -> None:
    config = fake_config()
    engine = FakeEngine(
        EngineConfig(
            model=config.model,
            lora=config.lora,
            scheduler=SchedulerConfig(scheduling_policy="priority"),
        )
    )
    async with client_for(engine) as client:
        await embedded(client, input=["a", "b"], cache_salt="s", priority=3, user="x")
    assert {(request.cache_salt, request.priority) for request in engine.seen} == {("s", 3)}
    assert len({id(group) for group in engine.groups}) == 1
    assert engine.groups[0].num_requests == 2


async def test_many_inputs_begin_a_few_at_a_time(
    engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    count = 5 * BEGUN_AT_ONCE
    answers = asyncio.create_task(embedded(client, input=["hi"] * count))
    begun = []
    while not answers.done():
        begun.append(len(engine.seen))
        await asyncio.sleep(0)
    assert len(await answers) == len(engine.seen) == count
    assert max(after - before for before, after in pairwise(begun)) <= BEGUN_AT_ONCE


@pytest.mark.parametrize(
    ("body", "words", "param"),
    [
        ({}, "either input", "input"),
        ({"input": []}, "either input", "input"),
        ({"input": "a", "messages": MESSAGES}, "either input", "input"),
        ({"input": ["a", []]}, "input 1 is empty", "input"),
        ({"input": "", "add_special_tokens": False}, "input 0 is empty", "input"),
        ({"input": [260]}, "out of vocabulary", "input"),
        ({"input": "a" * 600}, "the prompt's length is 601, but the model's context", "input"),
        ({"input": ["a"] * 2049}, "at most 2048", "input"),
        ({"input": {"a": 1}}, "must be a text", "input"),
        ({"input": "a", "dimensions": 9}, "[1, 8]", "dimensions"),
        ({"input": "a", "dimensions": 0}, "[1, 8]", "dimensions"),
        ({"input": "a", "encoding_format": "bytes"}, "'float' or 'base64'", "encoding_format"),
        ({"input": "a", "embed_dtype": "float16"}, "not supported", "embed_dtype"),
        ({"input": "a", "padding": "max_length"}, "not supported", "padding"),
        ({"input": [-1]}, "token id -1, which is out of vocabulary", "input"),
        ({"input": "a", "truncate_prompt_tokens": 513}, "[1, 512]", "truncate_prompt_tokens"),
        ({"input": "a", "stream": True}, "stream", "stream"),
        ({"input": "a", "temperature": 0.5}, "temperature", "temperature"),
    ],
)
async def test_mistakes_are_named(
    client: httpx.AsyncClient, body: dict[str, object], words: str, param: str
) -> None:
    error = error_of(await client.post(URL, json=body), 400)
    assert words in error["message"]
    assert error["param"] == param


async def test_an_answer_is_bounded_and_the_way_out_is_named(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embeddings, "MAX_FLOATS", 16)
    monkeypatch.setattr(embeddings, "MAX_BASE64_VALUES", 32)
    assert len(await embedded(client, input=["a"] * 2)) == 2
    assert len(await embedded(client, input=["a"] * 4, dimensions=4)) == 4
    assert len(await embedded(client, input=["a"] * 4, encoding_format="base64")) == 4
    error = error_of(await client.post(URL, json={"input": ["a"] * 4}), 400)
    assert "32 values, as float at most 16" in error["message"]
    assert "encoding_format" in error["message"]


async def test_a_client_that_leaves_ends_what_it_asked_for(engine: FakeEngine) -> None:
    engine.gate.clear()
    async with serving(engine) as url, httpx.AsyncClient(base_url=url) as client:
        asked = asyncio.create_task(client.post(URL, json={"input": ["a", "b", "c"]}))
        while len(engine.growing) < 3:
            await asyncio.sleep(0.005)
        asked.cancel()
        while engine.growing:
            await asyncio.sleep(0.005)
    assert len(engine.ended_early) == 3


async def test_openais_client_reads_it(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    (expected,) = await embedded(client, input="hi")
    async with (
        serving(engine, ServerConfig(api_key=("key",))) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0) as api,
    ):
        answer = await api.embeddings.create(model="base/model", input=["hi", "ho"])
        numbers = await api.embeddings.create(
            model="base/model", input="hi", encoding_format="float", dimensions=8, user="x"
        )
    assert answer.data[0].embedding == numbers.data[0].embedding == expected
    assert answer.usage.total_tokens == 6
