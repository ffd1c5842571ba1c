from __future__ import annotations

import asyncio

from lora_serve.config import EngineConfig
from lora_serve.engine.frontend.async_engine import AsyncEngine
from lora_serve.engine_stats import RequestTimes
from lora_serve.generate_request import GenerateRequest
from lora_serve.identity import BASE_MODEL
from lora_serve.messages import AbortRequests, EngineOutput, StepOutputs
from lora_serve.observability.metrics import EngineMetrics
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams
from tests.fakes.engine_client import READY, FakeClient
from tests.fakes.tokenizer import ByteTokenizer

LONG_AFTER = 3600.0


async def seen(
    *steps: tuple[str, str | None], told_later: bool = False
) -> tuple[dict[str, float], list[AbortRequests]]:
    """What metrics show of an answer until "no", and what the engine was sent of its end.

    steps: what each draws, and how the engine ends the answer with it, if it does.
    told_later: a step that follows the last tells how the request ended; else the last does.
    """
    client = FakeClient()
    engine = AsyncEngine(EngineConfig(), client, READY, ByteTokenizer(), EngineMetrics("m"))
    params = SamplingParams(max_tokens=30, seed=1, stop=("no",))
    request = GenerateRequest(request_id="r", prompt=TokensPrompt((1,)), params=params)
    stream = engine.generate(request)
    first = asyncio.create_task(anext(stream))
    while not client.requests:
        await asyncio.sleep(0)
    begin, num_drawn = client.requests[0].arrival_time, sum(len(text) for text, _ in steps)
    reason = steps[-1][1] or "abort"
    times = RequestTimes(
        "r", BASE_MODEL, reason, 1, num_drawn, 1, 0, 0, 30, begin, begin, begin, begin + LONG_AFTER
    )
    for text, reason_here in steps:
        output = EngineOutput("r", tuple(text.encode()), finish_reason=reason_here)
        is_last = (text, reason_here) == steps[-1] and not told_later
        client.reply(StepOutputs((output,), (times,) if is_last else ()))
    if told_later:
        client.reply(StepOutputs((), (times,)))
    await first
    async for _ in stream:
        pass
    for _ in range(20):
        await asyncio.sleep(0)
    lines = engine.metrics.render().decode().splitlines()
    values = (line.rsplit(" ", 1) for line in lines if line.startswith("vllm:"))
    found = {name.replace('engine="0",', ""): float(value) for name, value in values}
    await engine.shutdown()
    return found, [message for message in client.sent if isinstance(message, AbortRequests)]


def ends(found: dict[str, float]) -> dict[str, float]:
    reasons = ("stop", "length", "abort")
    return {
        reason: sum(
            value
            for name, value in found.items()
            if name.startswith("vllm:request_success_total{")
            and f'finished_reason="{reason}"' in name
        )
        for reason in reasons
    }


def one(found: dict[str, float], name: str) -> float:
    (value,) = (value for full, value in found.items() if full.startswith(f"vllm:{name}{{"))
    return value


async def test_what_a_stop_string_ends_is_no_abort_and_has_the_tokens_that_were_told() -> None:
    found, aborts = await seen(("a no", None), ("thing", None), told_later=True)
    assert aborts == [AbortRequests(("r",))]
    assert ends(found) == {"stop": 1, "length": 0, "abort": 0}
    assert one(found, "request_generation_tokens_sum") == len("a no")
    assert one(found, "e2e_request_latency_seconds_sum") < LONG_AFTER / 2
    assert one(found, "request_time_per_output_token_seconds_sum") < LONG_AFTER / 2


async def test_it_is_so_where_the_engine_ends_the_answer_behind_the_stop_string() -> None:
    found, aborts = await seen(("a", None), (" nothing", "length"))
    assert aborts == []
    assert ends(found) == {"stop": 1, "length": 0, "abort": 0}
    assert one(found, "request_generation_tokens_sum") == len("a no")


async def test_an_answer_that_no_stop_string_ends_is_counted_as_the_engine_tells() -> None:
    found, _ = await seen(("a yes", "length"))
    assert ends(found) == {"stop": 0, "length": 1, "abort": 0}
    assert one(found, "request_generation_tokens_sum") == len("a yes")
