"""What callers see when engines die under them, over engines that die at will."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from lora_serve.config import EngineConfig, LimitsConfig, SchedulerConfig
from lora_serve.engine.frontend import supervisor
from lora_serve.engine.frontend.async_engine import AsyncEngine
from lora_serve.engine.frontend.watchdog import Watchdog
from lora_serve.errors import (
    ConfigError,
    EngineDeadError,
    OverloadedError,
    RequestFailedError,
    SlowReaderError,
)
from lora_serve.generate_request import GenerateRequest
from lora_serve.messages import (
    AbortRequests,
    CallReply,
    EngineMessage,
    EngineOutput,
    EngineReady,
    RestoreAdapters,
    StepOutputs,
)
from lora_serve.observability.metrics import EngineMetrics
from lora_serve.outputs import OutputDelta
from lora_serve.pooling import PoolingParams
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import PROMPT_ONLY, SamplingParams
from tests.fakes.engine_client import READY, FakeClient
from tests.fakes.tokenizer import ByteTokenizer

DEADLY = 99


def make(
    *clients: FakeClient,
    limits: LimitsConfig | None = None,
    max_num_seqs: int = 128,
    tokenizer: ByteTokenizer | None = None,
) -> AsyncEngine:
    """An engine that goes through these clients, one after another's death."""
    first, *others = clients
    config = EngineConfig(
        limits=limits or LimitsConfig(), scheduler=SchedulerConfig(max_num_seqs=max_num_seqs)
    )
    later = iter(others)
    return AsyncEngine(
        config,
        first,
        READY,
        tokenizer or ByteTokenizer(),
        EngineMetrics("m"),
        make_client=lambda: next(later),
    )


async def generate(
    engine: AsyncEngine,
    request_id: str,
    *,
    prompt: Sequence[int] = (1, 2),
    max_tokens: int = 3,
    is_streamed: bool = True,
    n: int = 1,
) -> list[OutputDelta]:
    params = SamplingParams(max_tokens=max_tokens, seed=1, n=n)
    request = GenerateRequest(
        request_id=request_id,
        prompt=TokensPrompt(tuple(prompt)),
        params=params,
        is_streamed=is_streamed,
    )
    stream = engine.generate(request)
    return [delta async for delta in stream]


def one_token_prompt(max_tokens: int) -> GenerateRequest:
    params = SamplingParams(max_tokens=max_tokens)
    return GenerateRequest(request_id="r", prompt=TokensPrompt((1,)), params=params)


async def take(stream: AsyncIterator[OutputDelta], count: int) -> list[OutputDelta]:
    return [await anext(stream) for _ in range(count)]


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_request_that_was_told_nothing_is_answered_by_the_next_engine(
    is_streamed: bool,
) -> None:
    first, second = FakeClient(0), FakeClient(3)
    engine = make(first, second)
    answer = asyncio.create_task(generate(engine, "r", n=2, is_streamed=is_streamed))
    await settle()
    first.die()
    assert len(await asyncio.wait_for(answer, 5)) == 6
    assert second.requests == first.requests, "it is the same request, seed included"
    assert first.was_closed
    engine.check_health()
    assert b"lora_serve:engine_restarts_total{" in engine.metrics.render()
    await engine.shutdown()


async def test_an_embedding_is_asked_again_of_the_next_engine() -> None:
    first, second = FakeClient(0), FakeClient(0)
    engine = make(first, second)
    request = GenerateRequest(
        request_id="r",
        prompt=TokensPrompt((1, 2)),
        params=PROMPT_ONLY,
        pooling=PoolingParams(normalize=False),
        is_streamed=False,
    )
    answer = asyncio.create_task(anext(engine.generate(request)))
    await settle()
    first.die()
    await settle()
    assert second.requests == first.requests
    second.reply(StepOutputs((EngineOutput("r", pooled=bytes(8), finish_reason="stop"),)))
    assert (await asyncio.wait_for(answer, 5)).embedding == bytes(8)
    await engine.shutdown()


async def test_a_stream_that_had_begun_ends_with_an_error() -> None:
    first, second = FakeClient(1), FakeClient(3)
    engine = make(first, second)
    stream = engine.generate(one_token_prompt(max_tokens=3))
    assert (await anext(stream)).token_ids == (2,)
    first.die()
    with pytest.raises(EngineDeadError, match="signal 9"):
        await asyncio.wait_for(anext(stream), 5)
    await settle()
    assert second.requests == []
    await engine.shutdown()


async def test_a_whole_answer_in_its_middle_begins_again_without_a_trace() -> None:
    first, second = FakeClient(2), FakeClient(3)
    engine = make(first, second)
    answer = asyncio.create_task(generate(engine, "r", is_streamed=False))
    await settle()
    first.die()
    deltas = await asyncio.wait_for(answer, 5)
    assert [delta.token_ids for delta in deltas] == [(3,)] * 3
    assert [delta.finish_reason for delta in deltas] == [None, None, "length"]
    await engine.shutdown()


async def test_a_finished_answer_survives_the_engine_that_gave_it() -> None:
    first, second = FakeClient(3), FakeClient(3)
    engine = make(first, second)
    stream = engine.generate(one_token_prompt(max_tokens=3))
    await anext(stream)
    await settle()
    first.die()
    await settle()
    assert [delta.finish_reason async for delta in stream] == [None, "length"]
    assert second.requests == []
    await engine.shutdown()


async def test_a_request_that_kills_two_engines_is_refused_and_the_third_serves_others() -> None:
    clients = [FakeClient(3, deadly=DEADLY) for _ in range(3)]
    engine = make(*clients)
    with pytest.raises(RequestFailedError, match="died 2 times"):
        await asyncio.wait_for(generate(engine, "deadly", prompt=(DEADLY,)), 5)
    while not engine.is_alive:
        await asyncio.sleep(0)
    assert len(await generate(engine, "other")) == 3
    assert [len(client.requests) for client in clients] == [1, 1, 1]
    await engine.shutdown()


async def test_innocents_beside_a_killer_are_answered_by_the_engines_after_it() -> None:
    clients = [FakeClient(0), *(FakeClient(3, deadly=DEADLY) for _ in range(2))]
    engine = make(*clients)
    before = asyncio.create_task(generate(engine, "before", n=2))
    killer = asyncio.create_task(generate(engine, "killer", prompt=(DEADLY,), is_streamed=False))
    after = asyncio.create_task(generate(engine, "after", is_streamed=False))
    await settle()
    clients[0].die()
    with pytest.raises(RequestFailedError, match="died 2 times"):
        await asyncio.wait_for(killer, 5)
    assert len(await asyncio.wait_for(before, 5)) == 6
    assert len(await asyncio.wait_for(after, 5)) == 3
    assert [client.request_ids for client in clients[1:]] == [["before", "killer"], ["after"]]
    await engine.shutdown()


async def test_a_request_that_comes_during_a_quarantine_waits_for_its_end() -> None:
    first, second = FakeClient(0), FakeClient(0)
    engine = make(first, second)
    survivor = asyncio.create_task(generate(engine, "survivor"))
    await settle()
    first.die()
    while not second.requests:
        await asyncio.sleep(0)
    newcomer = asyncio.create_task(generate(engine, "new"))
    leaver = asyncio.create_task(generate(engine, "leaver"))
    await settle()
    assert second.request_ids == ["survivor"]
    leaver.cancel()
    await settle()
    second.num_tokens = 3
    second.give_tokens(second.requests[0], 3)
    assert len(await asyncio.wait_for(survivor, 5)) == 3
    assert len(await asyncio.wait_for(newcomer, 5)) == 3
    assert second.request_ids == ["survivor", "new"]
    await engine.shutdown()


async def test_a_probed_request_whose_caller_leaves_does_not_hold_the_others() -> None:
    first, second = FakeClient(0), FakeClient(0)
    engine = make(first, second)
    survivor = asyncio.create_task(generate(engine, "survivor"))
    other = asyncio.create_task(generate(engine, "other"))
    await settle()
    first.die()
    while not second.requests:
        await asyncio.sleep(0)
    second.num_tokens = 3
    survivor.cancel()
    assert len(await asyncio.wait_for(other, 5)) == 3
    assert AbortRequests(("survivor",)) in second.sent
    await engine.shutdown()


class GatedClient(FakeClient):
    """Takes messages in only while its gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()

    async def send(self, message: EngineMessage) -> None:
        await self.gate.wait()
        await super().send(message)


class SlowlyStarting(FakeClient):
    """Starts only when it may."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__(num_tokens)
        self.may_start = asyncio.Event()

    async def start(self, config: EngineConfig) -> EngineReady:
        await self.may_start.wait()
        return await super().start(config)


async def test_who_leaves_while_others_are_being_sent_is_not_sent() -> None:
    first, second = FakeClient(0), GatedClient()
    engine = make(first, second)
    survivor = asyncio.create_task(generate(engine, "survivor"))
    await settle()
    first.die()
    while not second.requests:
        await asyncio.sleep(0)
    a, b, leaver = (asyncio.create_task(generate(engine, name)) for name in ("a", "b", "leaver"))
    await settle()
    second.gate.clear()
    second.give_tokens(second.requests[0], 3)  # it is past where it stood
    await settle()  # the reply's reader sends a, the survivor's caller sends b
    leaver.cancel()
    await settle()
    second.num_tokens = 3
    second.gate.set()
    for answer in (survivor, a, b):
        assert len(await asyncio.wait_for(answer, 5)) == 3
    await settle()
    assert second.request_ids == ["survivor", "a", "b"]
    assert engine.num_unfinished == 0, "nothing is kept for a caller who has left"
    await engine.shutdown()


async def test_what_comes_while_there_is_no_engine_is_refused() -> None:
    first = FakeClient(0)
    failing = FakeClient(start_error=ConfigError("no model"))
    engine = make(first, failing, limits=LimitsConfig(restart_wait=0.01))
    first.die()
    await settle()
    for refused in (generate(engine, "r"), engine.get_stats()):
        with pytest.raises(EngineDeadError, match="started again"):
            await refused
    with pytest.raises(EngineDeadError):
        engine.check_health()
    await engine.shutdown()


async def test_a_request_waits_for_an_engine_that_will_soon_be_back() -> None:
    first, second = FakeClient(0), SlowlyStarting(3)
    engine = make(first, second)
    first.die()
    await settle()
    answer = asyncio.create_task(generate(engine, "r"))
    await settle()
    assert not answer.done()
    second.may_start.set()
    assert len(await asyncio.wait_for(answer, 5)) == 3
    await engine.shutdown()


async def test_a_request_waits_too_when_it_comes_before_a_later_death_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor, "FIRST_DELAY_SECONDS", 0.01)
    first, second, third = FakeClient(0), FakeClient(0), FakeClient(3)
    engine = make(first, second, third)
    first.die()
    while engine.metrics._num_restarts < 1:
        await asyncio.sleep(0)
    second.is_alive = False  # its process is waited for, to tell how it ended
    answer = asyncio.create_task(generate(engine, "r"))
    await settle()
    assert not answer.done()
    second.die()
    assert len(await asyncio.wait_for(answer, 5)) == 3
    await engine.shutdown()


async def test_a_request_that_comes_after_the_servers_end_does_not_wait() -> None:
    engine = make(FakeClient(0))
    await engine.shutdown()
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(generate(engine, "r"), 1)


async def test_a_request_that_waits_for_an_engine_hears_of_the_servers_end() -> None:
    first, second = FakeClient(0), SlowlyStarting(0)
    engine = make(first, second)
    first.die()
    await settle()
    answer = asyncio.create_task(generate(engine, "r"))
    await settle()
    await engine.shutdown()
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(answer, 1)


async def test_who_waits_hears_when_the_engine_cannot_be_started_again() -> None:
    first = FakeClient(0)
    engine = make(first, FakeClient(start_error=ConfigError("no model")))
    answer = asyncio.create_task(generate(engine, "r"))
    await settle()
    first.die()
    with pytest.raises(EngineDeadError, match="no model"):
        await asyncio.wait_for(answer, 5)
    await engine.shutdown()


async def test_calls_that_are_not_answered_fail_with_the_engine() -> None:
    first = FakeClient(0)
    engine = make(first, FakeClient(0))
    call = asyncio.create_task(engine.list_adapters())
    await settle()
    first.die()
    with pytest.raises(EngineDeadError, match="signal 9"):
        await asyncio.wait_for(call, 5)
    await engine.shutdown()


async def test_a_caller_who_leaves_during_a_restart_is_not_answered_by_the_next_engine() -> None:
    first, second = FakeClient(0), FakeClient(0)
    engine = make(first, second)
    answers = [asyncio.create_task(generate(engine, name)) for name in "ab"]
    await settle()
    first.die()
    answers[0].cancel()
    while not engine.is_alive:
        await asyncio.sleep(0)
    await settle()
    assert second.request_ids == ["b"]
    await engine.shutdown()
    with pytest.raises(EngineDeadError, match="shutting down"):
        await answers[1]


async def test_replies_that_cannot_be_read_are_a_death() -> None:
    first, second = FakeClient(0), FakeClient(3)
    engine = make(first, second)
    answer = asyncio.create_task(generate(engine, "r"))
    await settle()
    first.reply(ValueError("no msgpack"))
    assert len(await asyncio.wait_for(answer, 5)) == 3
    assert not first.is_alive, "it is ended, not left behind"
    await engine.shutdown()


class BrokenTokenizer(ByteTokenizer):
    """Cannot decode answers that begin with token 66."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if 66 in token_ids:
            raise ValueError("no such token")
        return super().decode(token_ids, skip_special_tokens)


async def test_a_bug_in_one_answers_text_ends_that_answer_alone() -> None:
    client = FakeClient(3)
    engine = make(client, tokenizer=BrokenTokenizer())
    with pytest.raises(RequestFailedError):
        await asyncio.wait_for(generate(engine, "r", prompt=(65,)), 5)
    assert len(await generate(engine, "other")) == 3
    assert any(isinstance(message, AbortRequests) for message in client.sent)
    await engine.shutdown()


async def test_a_reply_to_a_caller_who_has_just_given_up_does_no_harm() -> None:
    client = FakeClient(0)
    engine = make(client)
    call = asyncio.create_task(engine.list_adapters())
    await settle()
    client.reply(CallReply(client.sent[0].call_id))  # the reader is woken first,
    call.cancel()  # and sees the caller's future cancelled, but not yet gone
    with pytest.raises(asyncio.CancelledError):
        await call
    await settle()
    assert engine.is_alive
    await engine.shutdown()


async def test_the_next_engine_is_told_of_adapters_before_anything_else() -> None:
    first, second = FakeClient(0), FakeClient(3)
    engine = make(first, second)
    await engine.load_lora_adapter("a", "/a", pinned=True)
    await engine.load_lora_adapter("b", "/b")
    await engine.load_lora_adapter("c", "/c")
    await engine.reset_prefix_cache("a")
    await engine.reset_prefix_cache("c")
    await engine.unload_lora_adapter("c")
    answer = asyncio.create_task(generate(engine, "r"))
    await settle()
    first.die()
    await asyncio.wait_for(answer, 5)
    restore = second.sent[0]
    assert isinstance(restore, RestoreAdapters)
    assert [(a.name, a.path, a.generation, a.pinned) for a in restore.adapters] == [
        ("a", "/a", 1, True),
        ("b", "/b", 0, False),
    ]
    assert restore.generations == {"a": 1, "c": 1}
    assert second.requests
    await engine.shutdown()


async def test_a_reset_that_is_answered_after_its_name_was_unloaded_does_no_harm() -> None:
    first, second = FakeClient(0), FakeClient(3)
    engine = make(first, second)
    await engine.load_lora_adapter("a", "/a")
    first.holds_resets = True
    reset = asyncio.create_task(engine.reset_prefix_cache("a"))
    await settle()
    await engine.unload_lora_adapter("a")
    first.reply(first.resets[0])
    await asyncio.wait_for(reset, 5)
    assert engine.is_alive, "the same engine goes on"
    first.die()
    while not second.sent:
        await asyncio.sleep(0)
    assert second.sent[0] == RestoreAdapters((), {"a": 1})
    await engine.shutdown()


class BrokenMetrics(EngineMetrics):
    def observe(self, step: StepOutputs) -> None:
        raise ZeroDivisionError("a bug")


async def test_a_bug_in_the_bookkeeping_of_replies_ends_no_engine() -> None:
    client = FakeClient(3)
    metrics = BrokenMetrics("m")
    engine = AsyncEngine(EngineConfig(), client, READY, ByteTokenizer(), metrics)
    assert len(await asyncio.wait_for(generate(engine, "r"), 5)) == 3
    assert client.is_alive
    await engine.shutdown()


async def test_the_next_engine_gets_the_pool_that_requests_were_checked_against() -> None:
    first, second = FakeClient(0), FakeClient(0)
    engine = make(first, second)
    first.die()
    await settle()
    assert second.config is not None
    assert second.config.cache.num_gpu_blocks_override == READY.num_blocks
    await engine.shutdown()


async def test_a_reader_who_is_too_slow_is_given_up_and_its_answer_aborted() -> None:
    client = FakeClient(6)
    engine = make(client, limits=LimitsConfig(max_stream_backlog=4))
    stream = engine.generate(one_token_prompt(max_tokens=9))
    await anext(stream)
    await settle()
    with pytest.raises(SlowReaderError, match="--max-stream-backlog"):
        await take(stream, 5)
    assert AbortRequests(("r",)) in client.sent
    assert engine.num_unfinished == 0
    assert len(await generate(engine, "whole", max_tokens=6, is_streamed=False)) == 6
    await engine.shutdown()


async def test_more_than_may_be_queued_is_refused_and_counted() -> None:
    client = FakeClient(0)
    engine = make(client, limits=LimitsConfig(max_num_queued_reqs=1), max_num_seqs=2)
    answers = [asyncio.create_task(generate(engine, name)) for name in "abc"]
    await settle()
    with pytest.raises(OverloadedError, match="--max-num-queued-reqs"):
        await generate(engine, "d")
    for request in client.requests:
        client.give_tokens(request, 3)
    await asyncio.gather(*answers)
    assert b'reason="max_num_queued_reqs"} 1.0' in engine.metrics.render()
    client.num_tokens = 3
    assert len(await generate(engine, "e")) == 3
    await engine.shutdown()


async def test_a_prompts_choices_reach_the_engine_together_so_no_load_comes_between_them() -> None:
    client = FakeClient(3)
    engine = make(client)
    assert len(await generate(engine, "r", n=3)) == 9
    (message,) = client.requests
    assert message.choice_ids == ["r-0", "r-1", "r-2"]
    await engine.shutdown()


HASTY = LimitsConfig(step_timeout=0.2)


async def hang(clients: Sequence[FakeClient]) -> tuple[AsyncEngine, asyncio.Task, asyncio.Task]:
    """A stream that has begun, and an answer that waits, when the first engine begins to hang."""
    first = clients[0]
    engine = make(*clients, limits=HASTY)
    begun = asyncio.create_task(generate(engine, "begun", max_tokens=9))
    await settle()
    first.give_tokens(first.requests[0], 2)
    await settle()
    first.hangs = True
    waiting = asyncio.create_task(generate(engine, "waiting", is_streamed=False))
    return engine, begun, waiting


async def test_an_engine_that_hangs_is_ended_and_those_who_wait_are_answered() -> None:
    clients = FakeClient(0), FakeClient(3)
    engine, begun, waiting = await hang(clients)
    with pytest.raises(
        EngineDeadError, match=r"hangs: no step and no reply for 0\.2 s.*--step-tim"
    ):
        await asyncio.wait_for(begun, 5)
    assert len(await asyncio.wait_for(waiting, 5)) == 3
    assert clients[0].was_closed
    engine.check_health()
    assert b'engine_restarts_total{engine="0",model_name="m"} 1.0' in engine.metrics.render()
    await engine.shutdown()


async def test_without_the_watch_those_who_wait_for_a_hung_engine_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mutant that the test before this one must find."""
    monkeypatch.setattr(Watchdog, "hangs", lambda self, num_unfinished: False)
    engine, begun, waiting = await hang((FakeClient(0), FakeClient(3)))
    done, _ = await asyncio.wait((begun, waiting), timeout=1)
    assert not done
    with pytest.raises(EngineDeadError, match="stands still"):
        engine.check_health()
    await engine.shutdown()
    await asyncio.gather(begun, waiting, return_exceptions=True)


async def test_a_bug_in_one_look_at_the_engine_does_not_end_the_watch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    must_ask, faults = Watchdog.must_ask, [RuntimeError("a bug")]

    def faulty(self: Watchdog, num_unfinished: int) -> bool:
        if faults:
            raise faults.pop()
        return must_ask(self, num_unfinished)

    monkeypatch.setattr(Watchdog, "must_ask", faulty)
    engine, begun, waiting = await hang((FakeClient(0), FakeClient(3)))
    assert len(await asyncio.wait_for(waiting, 5)) == 3
    assert "could not be looked at" in caplog.text
    await asyncio.gather(begun, return_exceptions=True)
    await engine.shutdown()


async def test_an_engine_that_makes_no_step_but_answers_is_left_alone() -> None:
    """It may be reading an adapter."""
    client = FakeClient(0)
    engine = make(client, limits=HASTY)
    answer = asyncio.create_task(generate(engine, "r"))
    await asyncio.sleep(1)
    with pytest.raises(EngineDeadError, match="stands still"):
        engine.check_health()
    assert client.is_alive
    client.give_tokens(client.requests[0], 3)
    assert len(await asyncio.wait_for(answer, 5)) == 3
    await engine.shutdown()


@pytest.mark.parametrize("method", ["engine_died", "engine_is_back"])
async def test_a_bug_while_an_engine_is_replaced_ends_no_supervisor(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Requests that waited then get an error; later ones are answered."""
    first, second = FakeClient(0), FakeClient(3)
    engine = make(first, second)
    whole = getattr(AsyncEngine, method)

    def broken(self: AsyncEngine, *args: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(AsyncEngine, method, broken)
    waiting = asyncio.create_task(generate(engine, "waiting"))
    await settle()
    first.die()
    with pytest.raises(EngineDeadError, match="a bug"):
        await asyncio.wait_for(waiting, 5)
    async with asyncio.timeout(5):
        while not engine.is_alive:
            await asyncio.sleep(0.01)
    monkeypatch.setattr(AsyncEngine, method, whole)
    assert len(await asyncio.wait_for(generate(engine, "later"), 5)) == 3
    await engine.shutdown()
