from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.fakes.engine import FakeEngine, write_adapter
from tests.server.clients import error_of, events

URL = "/generate"


def body(**fields: object) -> dict[str, object]:
    params = {"max_new_tokens": 6, "temperature": 0, **fields.pop("params", {})}  # type: ignore[dict-item]
    asked = {"sampling_params": params, **fields}
    return asked if "input_ids" in fields else {"text": "Hello", **asked}


async def test_a_text_comes_back_for_a_text(client: httpx.AsyncClient) -> None:
    answer = (await client.post(URL, json=body(rid="mine"))).json()
    assert (answer["text"], answer["output_ids"]) == ("You sa", list(b"You sa"))
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (6, 6)  # with a start token
    assert "output_token_logprobs" not in meta
    by_ids = (await client.post(URL, json=body(input_ids=list(b"Hello")))).json()
    assert by_ids["text"] == answer["text"]


async def test_a_list_of_prompts_is_answered_by_a_list_and_so_are_several_choices(
    client: httpx.AsyncClient,
) -> None:
    for fields in ({"text": ["A", "B"]}, {"input_ids": [[65], [66]]}):
        answers = (
            await client.post(URL, json=body(**fields, params={"max_new_tokens": 11}))
        ).json()
        assert [answer["text"] for answer in answers] == ["You said: A", "You said: B"]
    (alone,) = (await client.post(URL, json=body(text=["A"]))).json()
    assert alone["text"] == "You sa"
    choices = (await client.post(URL, json=body(params={"n": 2, "temperature": 1}))).json()
    assert len(choices) == 2


async def test_logprobs_are_those_of_a_completion_to_the_bit(client: httpx.AsyncClient) -> None:
    asked = body(return_logprob=True, logprob_start_len=2, top_logprobs_num=2)
    meta = (await client.post(URL, json=asked)).json()["meta_info"]
    fields = {"max_tokens": 6, "temperature": 0, "logprobs": 2, "prompt_logprobs": 2}
    completion = (await client.post("/v1/completions", json={"prompt": "Hello", **fields})).json()
    (choice,) = completion["choices"]
    told = choice["logprobs"]["token_logprobs"]
    assert meta["output_token_logprobs"] == [
        [logprob, token_id, None] for logprob, token_id in zip(told, b"You sa", strict=True)
    ]
    assert [len(top) for top in meta["output_top_logprobs"]] == [2] * 6
    of_prompt = [
        [entry[str(token_id)]["logprob"], token_id, None]
        for entry, token_id in zip(choice["prompt_logprobs"][3:], b"llo", strict=True)
    ]
    assert meta["input_token_logprobs"] == [[None, ord("e"), None], *of_prompt]
    assert meta["input_top_logprobs"][0] is None


async def test_logprobs_have_texts_where_asked_and_none_of_the_prompt_by_default(
    client: httpx.AsyncClient,
) -> None:
    asked = body(return_logprob=True, return_text_in_logprobs=True)
    meta = (await client.post(URL, json=asked)).json()["meta_info"]
    assert [text for _, _, text in meta["output_token_logprobs"]] == list("You sa")
    assert meta["input_token_logprobs"] == []
    assert "output_top_logprobs" not in meta


async def test_each_event_of_a_stream_has_all_so_far(client: httpx.AsyncClient) -> None:
    asked = body(return_logprob=True, logprob_start_len=0)
    whole = (await client.post(URL, json=asked)).json()
    streamed = events((await client.post(URL, json={**asked, "stream": True})).text)
    texts = [str(each["text"]) for each in streamed]
    assert texts == ["You sa"[:end] for end in range(1, 7)]
    for each in (whole, streamed[-1]):
        for name in ("id", "e2e_latency"):
            del each["meta_info"][name]  # type: ignore[attr-defined]
    assert streamed[-1] == whole
    several = events((await client.post(URL, json=body(text=["A", "B"], stream=True))).text)
    last = {each["index"]: each["text"] for each in several}
    assert last == {0: "You sa", 1: "You sa"}


async def test_a_long_stream_repeats_itself_a_bounded_number_of_times(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lora_serve.server.sglang.generate.GROWTH", 4)
    asked = body(text="x" * 200, params={"max_new_tokens": 200}, stream=True)
    told = events((await client.post(URL, json=asked)).text)
    lengths = [len(each["output_ids"]) for each in told]  # type: ignore[arg-type]
    assert lengths[:5] == [1, 2, 3, 4, 6]
    assert lengths[-1] == 200
    assert sum(lengths) <= (4 + 2) * 200


async def test_settings_go_by_sglangs_names(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    params = {"min_new_tokens": 2, "sampling_seed": 7, "no_stop_trim": True, "stop": "sa"}
    answer = (await client.post(URL, json=body(params=params, extra_key="s"))).json()
    seen = engine.seen[-1].params
    assert (seen.min_tokens, seen.seed, seen.include_stop_str_in_output) == (2, 7, True)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "sa"}
    await client.post(URL, json={"text": "Hello"})
    assert engine.seen[-1].params.max_tokens == 128
    schema = '{"type": "object"}'
    await client.post(URL, json=body(params={"json_schema": schema}))
    constraint = engine.seen[-1].params.structured_outputs
    assert constraint is not None
    assert constraint.kind == "json"


async def test_an_adapter_answers_by_its_path_and_tells_its_version(
    engine: FakeEngine, client: httpx.AsyncClient, tmp_path: Path
) -> None:
    await engine.load_lora_adapter("tenant", write_adapter(tmp_path, "ALPHA"))
    answer = (await client.post(URL, json=body(lora_path="tenant"))).json()
    assert answer["text"] == "ALPHA:"
    assert answer["meta_info"]["weight_version"].endswith("-g0")
    error_of(await client.post(URL, json=body(lora_path="nobody")), 404)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": None}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"text": ["a", 1]}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": "a"}, "input_ids"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"params": {"top_p": 7}}, "sampling_params.top_p"),
        ({"params": {"stop_regex": "a"}}, "sampling_params.stop_regex"),
        ({"params": {"regex": "a", "ebnf": "root ::= 'a'"}}, "sampling_params"),
        ({"return_logprob": True, "top_logprobs_num": -2}, "top_logprobs_num"),
        ({"return_logprob": True, "logprob_start_len": 600}, "logprob_start_len"),
        ({"image_data": "a"}, "image_data"),
        ({"colour": 1}, "colour"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_sglangs_name(
    client: httpx.AsyncClient, fields: dict[str, object], param: str
) -> None:
    error = error_of(await client.post(URL, json=body(**fields)), 400)
    assert error["param"] == param
    assert param.rpartition(".")[2] in str(error["message"])
