"""Equal prompts at once: computed once, answered alike, and admitted by what is *not* cached."""

from __future__ import annotations

import asyncio

import pytest

from lora_serve.demo.client import Client, ServerRefusedError
from lora_serve.demo.server_process import ServerProcess
from tests.e2e.conftest import TIGHT_NUM_BLOCKS
from tests.e2e.metrics import metric
from tests.e2e.recording import Prompted, Recorded, record_alone, record_together
from tests.e2e.test_trace import random_ids

BLOCK_SIZE = 16
NUM_TOKENS = 600
NUM_EQUAL = 64
NUM_CACHED = (NUM_TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE


def base_request(seed: str, max_tokens: int) -> Prompted:
    return Prompted("lora-serve-demo", random_ids(seed, NUM_TOKENS), max_tokens)


async def test_equal_prompts_at_once_cost_one_prefill(
    server: ServerProcess, cold_server: ServerProcess
) -> None:
    request = base_request("equal prompts", max_tokens=8)
    (expected,) = await record_alone(cold_server.base_url, [request])
    computed = metric(server.base_url, "lora_serve:computed_tokens_total")
    together = await record_together(server.base_url, [request] * NUM_EQUAL)
    assert all(recorded.equals(expected) for recorded in together)
    hits = sorted(recorded.num_cached_tokens for recorded in together)
    assert hits == [0] + [NUM_CACHED] * (NUM_EQUAL - 1)
    computed = metric(server.base_url, "lora_serve:computed_tokens_total") - computed
    num_own = NUM_TOKENS - NUM_CACHED  # from the last block on, each computes its own
    num_decoded = NUM_EQUAL * (request.max_tokens - 1)  # the first token comes with the prompt
    assert computed == NUM_CACHED + NUM_EQUAL * num_own + num_decoded


async def test_many_equal_prompts_pass_through_a_pool_that_holds_a_handful(
    tight_server: ServerProcess, cold_server: ServerProcess
) -> None:
    """16 whole prompts would need five times the pool."""
    request = base_request("a crowd", max_tokens=4)
    assert 16 * NUM_TOKENS > 4 * TIGHT_NUM_BLOCKS * BLOCK_SIZE
    (expected,) = await record_alone(cold_server.base_url, [request])
    preempted = metric(tight_server.base_url, "vllm:num_preemptions_total")
    together = await record_together(tight_server.base_url, [request] * 120)
    assert all(recorded.equals(expected) for recorded in together)
    assert sum(recorded.num_cached_tokens == 0 for recorded in together) == 1
    assert metric(tight_server.base_url, "vllm:num_preemptions_total") == preempted


async def test_a_prompt_that_can_never_fit_is_refused_while_others_go_on(
    tight_server: ServerProcess, cold_server: ServerProcess
) -> None:
    request = base_request("goes on", max_tokens=64)
    (expected,) = await record_alone(cold_server.base_url, [request])

    def ask_too_much() -> str:
        with Client(tight_server.base_url) as client, pytest.raises(ServerRefusedError) as refusal:
            client.complete("lora-serve-demo", "word " * 1500)
        return str(refusal.value)

    going_on, refusal = await asyncio.gather(
        record_together(tight_server.base_url, [request]), asyncio.to_thread(ask_too_much)
    )
    assert ": 400 " in refusal
    assert "1024" in refusal
    assert_equal(going_on, [expected])


def assert_equal(recorded: list[Recorded], expected: list[Recorded]) -> None:
    for one, other in zip(recorded, expected, strict=True):
        assert one.equals(other)
