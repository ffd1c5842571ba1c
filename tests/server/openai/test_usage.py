from __future__ import annotations

import msgspec
from msgspec import UNSET

from lora_serve.identity import AdapterRef
from lora_serve.outputs import OutputDelta, RequestOutput
from lora_serve.prompts import TokensPrompt
from lora_serve.server.openai.inputs import Input
from lora_serve.server.openai.usage import UsageCounter

INPUTS = [Input(TokensPrompt((1, 2, 3))), Input(TokensPrompt((4,)))]


def test_cached_tokens_are_those_of_each_prompts_first_choice() -> None:
    usage = UsageCounter(b"", INPUTS)
    usage.add(0, OutputDelta(0, token_ids=(1,), num_cached_tokens=2))
    usage.add(0, OutputDelta(0, token_ids=(1,), num_cached_tokens=2))
    usage.add(0, OutputDelta(1, token_ids=(1,), num_cached_tokens=3))
    usage.add(1, OutputDelta(0, token_ids=(1, 2), num_cached_tokens=1))
    assert usage.usage.prompt_tokens == 4
    assert usage.usage.completion_tokens == 5
    assert usage.usage.total_tokens == 9
    assert usage.usage.prompt_tokens_details.cached_tokens == 3


def test_an_adapter_replaced_between_two_prompts_shows_as_two_versions() -> None:
    usage = UsageCounter(b"\xaa" * 32, INPUTS)
    old, new = AdapterRef("a", b"\x01" * 32), AdapterRef("a", b"\x02" * 32, generation=1)
    for index, adapter in ((0, old), (1, new), (0, old)):
        usage.add(index, OutputDelta(0, adapter=adapter))
    model = "aa" * 6
    assert usage.fingerprint == f"{model}-{'01' * 6}-g0,{model}-{'02' * 6}-g1"


def test_an_answer_that_no_version_gave_names_none() -> None:
    usage, delta = UsageCounter(b"\xaa" * 32, INPUTS), OutputDelta(0, adapter=None)
    output = RequestOutput("", [1])
    output.add(delta)
    usage.add(0, delta)
    usage.add_output(1, output)
    assert (usage.fingerprint, usage.fingerprint_of(None), output.adapter) == ("", "", None)


def test_cached_tokens_are_summed_by_tier_where_there_are_tiers() -> None:
    usage = UsageCounter(b"", INPUTS)
    usage.add(0, OutputDelta(0, num_cached_tokens=2, num_cached_by_tier={"device": 0, "disk": 2}))
    usage.add(1, OutputDelta(0, num_cached_tokens=1, num_cached_by_tier={"device": 1, "disk": 0}))
    details = usage.usage.prompt_tokens_details
    assert details.cached_tokens_by_tier == {"device": 1, "disk": 2}


def test_verified_drafts_are_told_where_there_were_any() -> None:
    usage = UsageCounter(b"", INPUTS)
    usage.add(0, OutputDelta(0, token_ids=(1,)))
    assert usage.usage.completion_tokens_details is UNSET
    usage.add(0, OutputDelta(0, token_ids=(1, 2, 3), num_accepted_drafts=2, num_rejected_drafts=3))
    usage.add(1, OutputDelta(0, token_ids=(1,), num_rejected_drafts=1))
    assert msgspec.to_builtins(usage.usage.completion_tokens_details) == {
        "accepted_prediction_tokens": 2,
        "rejected_prediction_tokens": 4,
    }
