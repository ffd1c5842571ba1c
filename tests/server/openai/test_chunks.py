from __future__ import annotations

import pytest
from msgspec import UNSET

from lora_serve.outputs import OutputDelta
from lora_serve.sampling_params import SamplingParams
from lora_serve.server.openai.chunks import ChunkPolicy
from lora_serve.server.openai.protocol import CompletionBody, StreamOptions
from lora_serve.server.openai.usage import UsageCounter

HELD_BACK = OutputDelta(0, "", token_ids=(5,))


def policy(logprobs: int | None = None, **body: object) -> ChunkPolicy:
    return ChunkPolicy(CompletionBody(**body), SamplingParams(logprobs=logprobs))


def test_a_delta_whose_text_is_held_back_makes_no_chunk() -> None:
    assert not policy().sends(HELD_BACK, has_text=False)


@pytest.mark.parametrize(
    "chosen",
    [
        policy(logprobs=0),
        policy(return_token_ids=True),
        policy(stream_options=StreamOptions(include_usage=True, continuous_usage_stats=True)),
    ],
)
def test_it_makes_one_when_something_else_of_it_is_shown(chosen: ChunkPolicy) -> None:
    assert chosen.sends(HELD_BACK, has_text=False)


def test_the_last_delta_makes_a_chunk_even_without_text() -> None:
    assert policy().sends(OutputDelta(0, finish_reason="stop"), has_text=False)


def test_a_chunks_usage_is_left_out_null_or_so_far() -> None:
    usage = UsageCounter(b"", [])
    assert policy().usage(usage) is UNSET
    assert policy(stream_options=StreamOptions(include_usage=True)).usage(usage) is None
    always = StreamOptions(include_usage=True, continuous_usage_stats=True)
    assert policy(stream_options=always).usage(usage) == usage.usage
    alone = StreamOptions(continuous_usage_stats=True)
    assert policy(stream_options=alone).usage(usage) is UNSET
