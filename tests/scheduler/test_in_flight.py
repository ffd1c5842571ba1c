"""Steps that are scheduled while the one before them is in flight."""

from __future__ import annotations

import pytest

from lora_serve.fuzz.oracle.content import EOS
from lora_serve.fuzz.oracle.engine import OracleEngine
from lora_serve.fuzz.oracle.executor import OracleExecutor
from lora_serve.fuzz.oracle.lone_answers import lone_answer
from lora_serve.messages import AbortRequests, ResetPrefixCache
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import ModelRunnerOutput, SchedulerOutput

LONG = [10 + i % 400 for i in range(200)]
PATIENT = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)


def prompt_that_ends_early(after: int) -> list[int]:
    """One whose answer is `after` tokens and then the end token."""
    prompts = ([n % 490 + 8, n // 490 + 8] for n in range(100_000))
    return next(
        p
        for p in prompts
        if len(answer := lone_answer(p, b"", after + 1)) == after + 1 and answer[-1] == EOS
    )


def test_a_step_is_scheduled_before_the_one_before_it_is_reported() -> None:
    engine = OracleEngine(async_scheduling=True)
    engine.add("a", LONG[:20], params=PATIENT)
    engine.step()
    assert engine.executor.steps == []  # it has not been waited for
    engine.step()
    assert len(engine.executor.steps) == 1
    engine.step()
    first, second = engine.executor.steps
    assert (first.requests[0].end, second.requests[0].start) == (20, 20)
    assert second.requests[0].token_from == 0


def test_every_decode_row_takes_its_token_from_the_step_in_flight() -> None:
    engine = OracleEngine(async_scheduling=True)
    for index in range(3):
        engine.add(f"r{index}", [index + 10, 5], params=PATIENT)
    engine.run()
    decodes = [r for step in engine.executor.steps[1:] for r in step.requests]
    assert len(decodes) == 3 * 11
    assert all(request.token_from is not None for request in decodes)
    for index in range(3):
        answer = lone_answer([index + 10, 5], b"", 12)
        assert engine.tokens(f"r{index}")[: len(answer)] == answer


def test_a_long_prompt_is_chunked_step_upon_step() -> None:
    engine = OracleEngine(async_scheduling=True, max_num_batched_tokens=64)
    engine.add("a", LONG, max_tokens=1)
    engine.run()
    assert [step.num_tokens for step in engine.executor.steps] == [64, 64, 64, 8]
    assert engine.tokens("a") == lone_answer(LONG, b"", 1)


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 7])
def test_nothing_is_computed_beyond_max_tokens(max_tokens: int) -> None:
    engine = OracleEngine(async_scheduling=True)
    engine.add(
        "a", LONG[:20], params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
    )
    engine.run()
    assert len(engine.tokens("a")) == max_tokens
    assert engine.executor.num_computed_tokens == 20 + max(0, max_tokens - 1)


def test_an_end_token_is_found_late_and_the_row_after_it_is_dropped() -> None:
    prompt = prompt_that_ends_early(after=3)
    engine = OracleEngine(async_scheduling=True)
    engine.add("a", prompt, max_tokens=40)
    engine.run()
    assert engine.tokens("a") == lone_answer(prompt, b"", 40)
    assert engine.last("a").finish_reason == "stop"
    assert engine.executor.num_computed_tokens == 2 + 3 + 1
    assert engine.kv.usage == 0.0


def test_min_tokens_are_counted_with_those_in_flight() -> None:
    engine = OracleEngine(async_scheduling=True)
    engine.add("a", [20, 21], params=SamplingParams(max_tokens=6, min_tokens=3, seed=1))
    engine.run()
    samples = [item for step in engine.executor.steps for item in step.requests[0].asked.samples]
    assert [sample.position for sample in samples] == list(range(2, 2 + len(samples)))
    banned = [bool(sample.banned_token_ids) for sample in samples]
    assert banned[:4] == [True, True, True, False]


def test_penalties_are_told_of_all_tokens_but_the_one_that_is_on_its_way() -> None:
    engine = OracleEngine(async_scheduling=True)
    params = SamplingParams(max_tokens=6, seed=1, ignore_eos=True, presence_penalty=0.5)
    engine.add("counts", [30, 31], params=params)
    engine.add("goes", [40, 41], params=PATIENT)
    engine.run()
    chunks = [r for step in engine.executor.steps for r in step.requests]
    counting = [r for r in chunks if r.request_id == "counts"]
    for position, chunk in enumerate(counting):
        (sample,) = chunk.asked.samples
        is_pending = chunk.token_from is not None
        assert sum(sample.seen.num_drawn) + is_pending == position
    assert [r.token_from is not None for r in counting] == [False, *[True] * 5]
    assert engine.tokens("counts") == lone_answer([30, 31], b"", 6)[:6]


def test_prompt_logprobs_come_once_for_every_token() -> None:
    engine = OracleEngine(async_scheduling=True, max_num_batched_tokens=32)
    engine.add("a", LONG, params=SamplingParams(max_tokens=3, seed=1, prompt_logprobs=0))
    engine.run()
    told = [entry.token_id for o in engine.outputs["a"] for entry in o.prompt_logprobs]
    assert told == LONG[1:]


def test_without_room_the_step_in_flight_is_reported_before_anybody_is_preempted() -> None:
    engine = OracleEngine(async_scheduling=True, num_blocks=8, max_num_seqs=4)
    prompts = {name: [n, *range(10, 40)] for n, name in enumerate(("a", "b", "c"))}
    for name, prompt in prompts.items():
        engine.add(name, prompt, params=SamplingParams(max_tokens=50, seed=1, ignore_eos=True))
    while engine.core.has_requests:
        num_preemptions = engine.core.scheduler.totals.num_preemptions
        engine.step()
        if engine.core.scheduler.totals.num_preemptions > num_preemptions:
            # What was scheduled by the step that preempted stands alone.
            assert len(engine.core.scheduler._in_flight) == 1
    assert engine.core.scheduler.totals.num_preemptions > 0
    for name, prompt in prompts.items():
        answer = lone_answer(prompt, b"", 50)
        assert engine.tokens(name)[: len(answer)] == answer


def test_blocks_that_the_step_in_flight_frees_spare_a_preemption() -> None:
    engine = OracleEngine(async_scheduling=True, num_blocks=3, max_num_seqs=2)
    engine.add(
        "ends", [1, *range(10, 24)], params=SamplingParams(max_tokens=1, ignore_eos=True, seed=1)
    )
    engine.add("grows", [2, *range(10, 41)], max_tokens=8)
    engine.run()
    assert engine.core.scheduler.totals.num_preemptions == 0
    assert engine.tokens("grows") == lone_answer([2, *range(10, 41)], b"", 8)


def test_an_abort_frees_blocks_that_the_step_in_flight_still_writes() -> None:
    engine = OracleEngine(async_scheduling=True, num_blocks=5, max_num_seqs=2)
    engine.add("leaves", [1, *range(10, 60)], max_tokens=20)
    engine.step()
    engine.core.handle(AbortRequests(("leaves",)))
    assert engine.kv.usage == 0.0
    other = [2, *range(100, 150)]
    engine.add("comes", other, max_tokens=20)
    engine.run()
    assert engine.tokens("comes") == lone_answer(other, b"", 20)
    assert "leaves" not in engine.outputs
    assert engine.kv.usage == 0.0


def test_nothing_that_was_in_flight_at_a_reset_is_offered_after_it() -> None:
    engine = OracleEngine(async_scheduling=True, max_num_batched_tokens=64)
    engine.add("a", LONG, max_tokens=2)
    engine.step()
    engine.step()
    engine.core.handle(ResetPrefixCache(1))
    engine.run()
    assert engine.kv.pool.num_cached == 0
    engine.add("b", LONG, max_tokens=2)
    engine.run()
    assert engine.num_cached("b") == 0


class FailsOnce(OracleExecutor):
    """The third step ends in an error, as a device's may, when it is waited for."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        output = super().execute(step)
        if len(self.steps) == 3:
            raise RuntimeError("the device is lost")
        return output


@pytest.mark.parametrize("is_overlapped", [False, True])
def test_a_step_that_fails_commits_nothing(is_overlapped: bool) -> None:
    engine = OracleEngine(
        async_scheduling=is_overlapped, executor_class=FailsOnce, max_num_batched_tokens=64
    )
    engine.add("a", LONG, max_tokens=2)
    with pytest.raises(RuntimeError, match="the device is lost"):
        engine.run()
    assert engine.kv.pool.num_cached == 2 * 64 // 16
    assert engine.core.scheduler.totals.num_steps == 2


def test_an_engine_is_busy_until_what_is_in_flight_is_reported() -> None:
    engine = OracleEngine(async_scheduling=True)
    engine.add("a", LONG[:20], max_tokens=5)
    engine.step()
    engine.core.handle(AbortRequests(("a",)))
    assert engine.step()  # the aborted request's step is collected
    assert not engine.step()
    assert len(engine.executor.steps) == 1


def test_closing_waits_for_what_is_in_flight() -> None:
    engine = OracleEngine(async_scheduling=True)
    engine.add("a", LONG[:20], max_tokens=5)
    engine.step()
    engine.core.handle(AbortRequests(("a",)))
    engine.core.close()
    assert len(engine.executor.steps) == 1
