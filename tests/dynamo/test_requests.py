from __future__ import annotations

import pytest

from lora_serve.dynamo.requests import Chunks, engine_request, sampling_params
from lora_serve.errors import InvalidRequestError
from lora_serve.identity import BASE_MODEL
from lora_serve.outputs import OutputDelta
from lora_serve.prompts import TokensPrompt
from lora_serve.step import TokenLogprobs
from lora_serve.structured_outputs import StructuredOutput

NAMES = ("base", "alias")


def test_what_the_preprocessor_asks_for_is_what_the_engine_is_asked() -> None:
    asked = engine_request(
        {
            "token_ids": [1, 2, 3],
            "model": "tenant",
            "sampling_options": {"temperature": 0.0, "top_p": None, "seed": 7, "n": 2},
            "stop_conditions": {
                "max_tokens": 9,
                "stop": ["the frontend's"],
                "stop_token_ids_hidden": [5, 4],
                "ignore_eos": True,
            },
            "output_options": {"logprobs": 3, "skip_special_tokens": True},
            "routing": {"priority": 4},
        },
        "id",
        NAMES,
    )
    assert asked.prompt == TokensPrompt((1, 2, 3))
    assert (asked.lora_name, asked.client_request_id, asked.priority) == ("tenant", "id", 4)
    params = asked.params
    assert (params.temperature, params.top_p, params.seed, params.n) == (0.0, 1.0, 7, 2)
    assert (params.max_tokens, params.ignore_eos, params.stop) == (9, True, ())
    assert params.stop_token_ids == (4, 5)
    assert params.logprobs == 3


@pytest.mark.parametrize("model", ["base", "alias", "", None])
def test_the_base_model_is_no_adapter(model: str | None) -> None:
    request = {"token_ids": [1], "model": model}
    first, second = (engine_request(request, "same", NAMES) for _ in range(2))
    assert first.lora_name is BASE_MODEL
    assert first.request_id != second.request_id, "an id may be sent twice"
    assert first.params.max_tokens is None, "as much as there is room for"


def test_an_answer_can_be_held_to_a_grammar() -> None:
    request = {"token_ids": [1], "sampling_options": {"guided_decoding": {"regex": "a+"}}}
    assert sampling_params(request).structured_outputs == StructuredOutput("regex", "a+")
    nothing = {"token_ids": [1], "sampling_options": {"guided_decoding": {"backend": "any"}}}
    assert sampling_params(nothing).structured_outputs is None


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        ({"sampling_options": {"use_beam_search": True}}, "use_beam_search is not supported"),
        ({"sampling_options": {"best_of": 3}}, "best_of is not supported"),
        ({"sampling_options": {"temperature": "warm"}}, "cannot be read"),
        ({"sampling_options": {"guided_decoding": {"regex": "a", "json": {}}}}, "give one of"),
        ({"multi_modal_data": {"image": []}}, "multi_modal_data is not served here"),
        ({"prefill_result": {"x": 1}}, "prefill_result is not served here"),
    ],
)
def test_what_there_is_not_here_is_refused_by_name(request_: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        engine_request({"token_ids": [1], **request_}, "id", NAMES)


def test_chunks_tell_new_tokens_their_logprobs_and_at_the_end_how_many() -> None:
    asked = engine_request(
        {"token_ids": [1, 2], "sampling_options": {"n": 2}, "output_options": {"logprobs": 1}},
        "id",
        NAMES,
    )
    chunks = Chunks(asked, "<{}>".format)
    logprobs = (TokenLogprobs(8, -0.5, 2, ((9, -0.25),)),)
    assert chunks.chunk(OutputDelta(1, "x", (8,), logprobs)) == {
        "token_ids": [8],
        "index": 1,
        "log_probs": [-0.5],
        "top_logprobs": [[{"rank": 1, "token_id": 9, "token": "<9>", "logprob": -0.25}]],
    }
    assert chunks.chunk(OutputDelta(0, token_ids=(3, 4), finish_reason="stop")) == {
        "token_ids": [3, 4],
        "index": 0,
        "finish_reason": "stop",
        "completion_usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
    }
    last = chunks.chunk(OutputDelta(1, token_ids=(5,), finish_reason="length"))
    assert last["completion_usage"]["completion_tokens"] == 2
