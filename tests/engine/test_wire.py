from __future__ import annotations

import pytest

from lora_serve.engine.wire import encoder, message_decoder, reply_decoder
from lora_serve.engine_stats import EngineStats, TierContents
from lora_serve.generate_request import GenerateRequest
from lora_serve.identity import BASE_MODEL, EVERYTHING, AdapterRef, Everything, NoAdapter
from lora_serve.kv_tiers.base import Cause
from lora_serve.kv_tiers.breaker import Breaker
from lora_serve.kv_tiers.counters import TierCounters
from lora_serve.messages import (
    CallReply,
    EngineOutput,
    EngineRequest,
    ResetPrefixCache,
    StepOutputs,
)
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams


def num_bytes(n: int) -> int:
    params = SamplingParams(n=n, seed=0, stop=("x" * 1024,) * 16)
    request = GenerateRequest(
        request_id="r", prompt=TokensPrompt(tuple(range(100_000))), params=params
    )
    return len(encoder().encode(EngineRequest(request)))


def test_the_choices_of_a_request_share_its_prompt_and_its_stop_strings_in_one_message() -> None:
    assert num_bytes(128) - num_bytes(1) < 10


@pytest.mark.parametrize("scope", [EVERYTHING, "a", ""])
def test_what_is_reset_is_the_same_on_the_other_side(scope: str | Everything) -> None:
    sent = ResetPrefixCache(1, scope)
    assert message_decoder().decode(encoder().encode(sent)) == sent


@pytest.mark.parametrize("adapter", [BASE_MODEL, AdapterRef("a", b"d", 1)])
def test_what_answered_is_the_same_on_the_other_side(adapter: AdapterRef | NoAdapter) -> None:
    sent = StepOutputs((EngineOutput("r", adapter=adapter),))
    assert reply_decoder().decode(encoder().encode(sent)) == sent


def test_the_figures_of_a_tier_are_the_same_on_the_other_side() -> None:
    counters = TierCounters()
    counters.miss(Cause.ABSENT)
    counters.load_took(0.2)
    contents = TierContents(3, 4, 5, 6, {"damaged": 1})
    figures = counters.figures("disk", contents, Breaker(), Breaker())
    sent = CallReply(1, stats=EngineStats(kv_tiers=(figures,)))
    assert reply_decoder().decode(encoder().encode(sent)) == sent
