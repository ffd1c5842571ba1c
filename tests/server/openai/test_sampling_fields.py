"""Every API takes every sampling field, brings it to the engine, or says why it has none."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from lora_serve.engine.frontend.admission import RequestGroup
from lora_serve.generate_request import GenerateRequest
from lora_serve.outputs import OutputDelta
from lora_serve.sampling_params import SamplingParams
from lora_serve.server.anthropic.protocol import MessagesBody
from lora_serve.server.inference.protocol import GenerateBody, SamplingBody
from lora_serve.server.openai.protocol import (
    ChatBatchBody,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
)
from lora_serve.server.openai.sampling_fields import GenerationFields
from lora_serve.server.pooling.protocol import (
    CohereEmbedBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from lora_serve.server.responses.protocol import ResponseBody
from lora_serve.server.routes import OPERATIONS
from lora_serve.server.sagemaker.protocol import InvocationBody
from lora_serve.server.sglang.protocol import SglangGenerateBody, SglangSampling
from lora_serve.structured_outputs import StructuredOutput
from tests.fakes.engine import FakeEngine
from tests.server.clients import error_of

# A value that is no default, as JSON, and what the engine is asked for.
FIELDS: dict[str, tuple[object, object]] = {
    "n": (2, 2),
    "max_tokens": (7, 7),
    "min_tokens": (3, 3),
    "temperature": (0.5, 0.5),
    "top_p": (0.75, 0.75),
    "top_k": (9, 9),
    "min_p": (0.25, 0.25),
    "presence_penalty": (0.5, 0.5),
    "frequency_penalty": (-0.5, -0.5),
    "repetition_penalty": (1.5, 1.5),
    "seed": (42, 42),
    "stop": (["x", "yz"], ("x", "yz")),
    "stop_token_ids": ([5, 7, 5], (5, 7)),
    "include_stop_str_in_output": (True, True),
    "ignore_eos": (True, True),
    "logit_bias": ({"5": 2}, {5: 2.0}),
    "allowed_token_ids": ([97, 98], (97, 98)),
    "bad_words": (["no", "no"], ("no",)),
    "logprob_token_ids": ([97, 98, 97], (97, 98)),
    "skip_special_tokens": (False, False),
    "structured_outputs": ({"choice": ["a", "b"]}, StructuredOutput.of(choice=["a", "b"])),
    "prompt_logprobs": (2, 2),
    "prompt_logprob_start": (1, 1),
    "prompt_logprobs_last_n": (1, 1),
}
WITHOUT_EFFECT = {"spaces_between_special_tokens", "repetition_detection"}
REFUSED = {"watermarking", "routed_experts_prompt_start"}
NEEDS_MARKS = {"thinking_token_budget"}  # of reasoning: tests/server/openai/test_chat_parts.py
SCORING = {"prompt_logprobs", "prompt_logprob_start", "prompt_logprobs_last_n"}

OTHER_NAMES: dict[type[BaseModel], Mapping[str, str]] = {
    ResponseBody: {"max_tokens": "max_output_tokens"},
    MessagesBody: {"stop": "stop_sequences"},
    SglangGenerateBody: {
        "max_tokens": "max_new_tokens",
        "min_tokens": "min_new_tokens",
        "seed": "sampling_seed",
        "include_stop_str_in_output": "no_stop_trim",
    },
}
SAMPLING: dict[type[BaseModel], type[BaseModel]] = {
    GenerateBody: SamplingBody,
    SglangGenerateBody: SglangSampling,
}
ANTHROPIC = {"max_tokens", "temperature", "top_p", "top_k", "stop", "seed"}
# By body and by the reason, the fields that it has not.
UNSUPPORTED: dict[type[BaseModel], Mapping[str, set[str]]] = {
    ResponseBody: {
        "a response has one answer": {"n"},
        "a response has no place for logprobs of the prompt": SCORING,
    },
    MessagesBody: {"Anthropic's API has no word for it": set(FIELDS) - ANTHROPIC},
    SglangGenerateBody: {
        "a kind of constraint is a field": {"structured_outputs"},
        "logprobs are asked for beside the sampling parameters": SCORING,
        "SGLang has no word for it": {"allowed_token_ids", "bad_words", "logprob_token_ids"},
    },
    **{
        body: {"an embedding has no tokens that are drawn": set(FIELDS)}
        for body in (EmbeddingBody, PoolingBody, ScoreBody, RerankBody)
    },
    CohereEmbedBody: {"no tokens are drawn; max_tokens is a text's": set(FIELDS) - {"max_tokens"}},
}


def fields_of(body: type[BaseModel]) -> set[str]:
    names = {theirs: ours for ours, theirs in OTHER_NAMES.get(body, {}).items()}
    sampling = SAMPLING.get(body, body)
    return {names.get(name, name) for name in sampling.model_fields}


def test_this_table_has_every_sampling_field() -> None:
    taken = set(FIELDS) | NEEDS_MARKS
    assert taken | WITHOUT_EFFECT | REFUSED == set(GenerationFields.model_fields)
    assert taken | {"logprobs", "reasoning"} == set(SamplingParams.__struct_fields__)


GENERATING = {each.body for each in OPERATIONS if each.generates and each.body is not None}


@pytest.mark.parametrize(
    "body", sorted(GENERATING - {InvocationBody}, key=lambda body: body.__name__)
)
def test_every_body_has_every_sampling_field_or_says_why_not(body: type[BaseModel]) -> None:
    missing = set(FIELDS) - fields_of(body)
    named = [name for names in UNSUPPORTED.get(body, {}).values() for name in names]
    assert missing == set(named)


def completion(fields: Mapping[str, object]) -> dict[str, object]:
    return {"prompt": "Hello", **fields}


def chat(fields: Mapping[str, object]) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "Hello"}], **fields}


def batch(fields: Mapping[str, object]) -> dict[str, object]:
    return {"messages": [[{"role": "user", "content": "Hello"}]], **fields}


def generate(fields: Mapping[str, object]) -> dict[str, object]:
    return {"token_ids": [72, 105], "sampling_params": dict(fields)}


def sglang(fields: Mapping[str, object]) -> dict[str, object]:
    return {"text": "Hello", "sampling_params": dict(fields)}


def response(fields: Mapping[str, object]) -> dict[str, object]:
    return {"input": "Hello", **fields}


def message(fields: Mapping[str, object]) -> dict[str, object]:
    return {**chat({"model": "alias", "max_tokens": 8}), **fields}


APIS: dict[str, tuple[type[BaseModel], Callable[[Mapping[str, object]], dict[str, object]]]] = {
    "/v1/completions": (CompletionBody, completion),
    "/v1/chat/completions": (ChatBody, chat),
    "/v1/chat/completions/batch": (ChatBatchBody, batch),
    "/inference/v1/generate": (GenerateBody, generate),
    "/generate": (SglangGenerateBody, sglang),
    "/v1/responses": (ResponseBody, response),
    "/v1/messages": (MessagesBody, message),
}
REFUSED_IN_BATCHES = {"n", *SCORING}  # by name, like tools: tests/server/openai/test_chat_batch.py


class EngineThatNotes(FakeEngine):
    """Keeps what was asked of it, as it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[SamplingParams] = []

    def generate(
        self, request: GenerateRequest, group: RequestGroup | None = None
    ) -> AsyncGenerator[OutputDelta, None]:
        self.asked.append(request.params)
        return super().generate(request, group)


@pytest.fixture
def engine() -> EngineThatNotes:
    return EngineThatNotes()


@pytest.mark.parametrize("path", APIS)
async def test_a_sampling_field_reaches_the_engine_by_every_api(
    engine: EngineThatNotes, client: httpx.AsyncClient, path: str
) -> None:
    body, written = APIS[path]
    names = OTHER_NAMES.get(body, {})
    left_out = REFUSED_IN_BATCHES if body is ChatBatchBody else set()
    for name in set(FIELDS) - left_out:
        value, wanted = FIELDS[name]
        fields = {names.get(name, name): value}
        if name in SCORING:
            fields = {"prompt_logprobs": 2} | fields
        answer = await client.post(path, json=written(fields))
        if name in fields_of(body):
            assert answer.status_code == 200, answer.text
            assert getattr(engine.asked[-1], name) == wanted
        else:
            assert name in error_of(answer, 400)["message"]


async def test_logprobs_of_named_tokens_are_the_same_by_every_api(
    client: httpx.AsyncClient,
) -> None:
    """`Y` is the first token that is drawn, and stands among them as none of them is."""
    asked = {"logprob_token_ids": [97, 98]}

    async def told(path: str) -> Any:
        answer = await client.post(path, json=APIS[path][1](asked))
        assert answer.status_code == 200, answer.text
        return answer.json()

    (choice,) = (await told("/v1/chat/completions"))["choices"]
    chats = choice["logprobs"]["content"]
    (item,) = (await told("/v1/responses"))["output"]
    assert item["content"][0]["logprobs"] == chats
    (choice,) = (await told("/inference/v1/generate"))["choices"]
    generated = choice["logprobs"]["content"]
    tokens = [[b"Y"[0]], [97], [98]]
    assert [token["bytes"] for token in chats[0]["top_logprobs"]] == tokens
    assert [[token["token_id"]] for token in generated[0]["top_logprobs"]] == tokens
    assert [token["rank"] for token in generated[0]["top_logprobs"]] == [21, None, None]
    assert [token["logprob"] for token in generated[0]["top_logprobs"]] == [
        token["logprob"] for token in chats[0]["top_logprobs"]
    ]
