"""Pauses as the API process sees them: over restarts, health and requests that no engine has."""

from __future__ import annotations

import asyncio

import pytest

from lora_serve.config import LimitsConfig
from lora_serve.engine.frontend.async_engine import AsyncEngine
from lora_serve.engine.frontend.pause import PauseRecord
from lora_serve.errors import EngineDeadError
from lora_serve.messages import EndRequests, EngineRequest, Pause, RestoreAdapters, Resume
from tests.engine.frontend.test_engine_deaths import generate, make, settle
from tests.fakes.engine_client import FakeClient
from tests.server.clients import client_for, error_of, eventually


async def test_an_engine_that_is_started_while_paused_is_paused_before_it_gets_a_request() -> None:
    first, second = FakeClient(0), FakeClient(3)
    engine = make(first, second)
    answer = asyncio.create_task(generate(engine, "r"))
    await settle()
    await engine.pause("wait")
    first.die()
    assert len(await asyncio.wait_for(answer, 5)) == 3
    assert [type(message) for message in second.sent] == [RestoreAdapters, Pause, EngineRequest]
    assert second.sent[1] == Pause(0, "keep")
    assert engine.is_paused
    await engine.resume()
    assert not engine.is_paused
    await engine.shutdown()


class ForgetsAtARestart(PauseRecord):
    def first_messages(self, call_id: int) -> list[Pause]:
        return []


async def test_without_the_record_the_next_engine_would_go_on() -> None:
    first, second = FakeClient(0), FakeClient(3)
    engine = make(first, second)
    engine._pause = ForgetsAtARestart()
    await engine.pause("keep")
    first.die()
    await asyncio.wait_for(generate(engine, "r"), 5)
    assert not any(isinstance(message, Pause) for message in second.sent)
    await engine.shutdown()


async def test_a_paused_engine_that_makes_no_step_is_healthy_and_again_after_the_pause() -> None:
    client = FakeClient(0)
    engine = make(client, limits=LimitsConfig(step_timeout=0.2))
    answer = asyncio.create_task(generate(engine, "r"))
    await settle()
    await engine.pause("keep")
    await asyncio.sleep(0.25)
    engine.check_health()
    await engine.resume()
    engine.check_health()
    await asyncio.sleep(0.25)
    with pytest.raises(EngineDeadError, match="stands still"):
        engine.check_health()
    client.give_tokens(client.requests[0], 3)
    await asyncio.wait_for(answer, 5)
    await engine.shutdown()


async def test_a_pause_that_aborts_ends_requests_that_no_engine_has() -> None:
    engine = make(FakeClient(0))
    engine._answers._quarantine._patient_until = float("inf")
    engine._answers._quarantine._probed = engine._answers._quarantine._probed or _never_over()
    answer = asyncio.create_task(generate(engine, "r", n=2))
    await settle()
    assert await engine.pause("abort") == 1
    deltas = await asyncio.wait_for(answer, 5)
    assert [(d.index, d.finish_reason) for d in deltas] == [(0, "abort"), (1, "abort")]
    assert engine._answers._admission.num_queued == 0
    await engine.shutdown()


async def test_an_aborted_embedding_that_no_engine_has_is_an_error_over_http() -> None:
    engine = make(FakeClient(0))
    engine._answers._quarantine._probed = _never_over()
    engine._answers._quarantine._patient_until = float("inf")
    await _abort_embedding(engine)


async def test_an_aborted_embedding_that_an_engine_has_is_an_error_over_http() -> None:
    await _abort_embedding(make(FakeClient(0)))


async def _abort_embedding(engine: AsyncEngine) -> None:
    """One body has two inputs; a part of an answer, or an empty embedding, would be a wrong one."""
    async with client_for(engine) as client:
        answer = asyncio.create_task(client.post("/v1/embeddings", json={"input": ["a", "b"]}))
        await eventually(lambda: answer.done() or len(list(engine._answers._states)) == 2)
        assert (await client.post("/abort_requests")).json()["aborted"] == 2
        error = error_of(await asyncio.wait_for(answer, 5), 503)
    assert "was aborted by a call; send it again" in error["message"]
    assert engine._answers._admission.num_queued == 0
    await engine.shutdown()


def _never_over() -> object:
    class State:
        is_over = is_past_its_death = False

    return State()


async def test_requests_are_ended_by_what_is_asked_of_them() -> None:
    client = FakeClient(0)
    engine = make(client)
    answers = {name: asyncio.create_task(generate(engine, name, n=2)) for name in ("a", "b")}
    await settle()
    assert await engine.abort_requests(lambda request: request.request_id == "a") == 1
    deltas = await asyncio.wait_for(answers["a"], 5)
    assert [delta.finish_reason for delta in deltas] == ["abort", "abort"]
    assert not answers["b"].done()
    assert EndRequests(1, ("a-0", "a-1")) in client.sent
    assert await engine.abort_requests(lambda _: True) == 1
    await asyncio.wait_for(answers["b"], 5)
    await engine.shutdown()


async def test_neither_call_is_taken_while_there_is_no_engine() -> None:
    first, second = FakeClient(0), FakeClient(3)
    engine = make(first, second)
    await engine.pause("keep")
    first.die()
    for call in (engine.resume(), engine.pause("keep")):
        with pytest.raises(EngineDeadError):
            await call
    assert engine.is_paused, "what fails changes nothing"
    await asyncio.wait_for(generate(engine, "r"), 5)  # waits for the next one
    await engine.resume()
    assert isinstance(second.sent[-1], Resume)
    await engine.shutdown()
