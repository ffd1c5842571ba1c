from __future__ import annotations

from collections import Counter

import pytest

from lora_serve.fuzz.oracle.content import EOS
from lora_serve.fuzz.oracle.engine import OracleEngine
from lora_serve.fuzz.oracle.lone_answers import lone_answer, lone_prompt_logprobs
from lora_serve.messages import AbortRequests, ResetPrefixCache
from lora_serve.sampling_params import SamplingParams

LONG = [10 + i % 400 for i in range(200)]


def params(**settings: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 4, "seed": 1, **settings})  # type: ignore[arg-type]


def test_a_long_prompt_is_computed_in_chunks_of_the_budget() -> None:
    engine = OracleEngine(max_num_batched_tokens=64)
    engine.add("a", LONG, max_tokens=1)
    engine.run()
    assert [step.num_tokens for step in engine.executor.steps] == [64, 64, 64, 8]
    assert engine.tokens("a") == lone_answer(LONG, b"", 1)


def test_a_long_prefill_never_stops_the_decode_of_others() -> None:
    engine = OracleEngine(max_num_batched_tokens=32, policy="priority")
    for name in ("one", "two"):
        engine.add(name, [1, 2, 3], priority=5, max_tokens=30)
    engine.step()
    engine.add("long", LONG, priority=1, max_tokens=1)
    for _ in range(4):
        engine.step()
    chunks = [[r.num_tokens for r in step.requests] for step in engine.executor.steps]
    assert chunks == [[3, 3], [1, 1, 30], *[[30, 1, 1]] * 3]


def test_identical_prompts_cost_one_prefill() -> None:
    engine = OracleEngine(num_blocks=64, max_num_seqs=64)
    for index in range(20):
        engine.add(f"r{index}", LONG, max_tokens=2)
    engine.run()
    shared = 192  # twelve full blocks of sixteen
    num_decoded = sum(len(engine.tokens(f"r{i}")) - 1 for i in range(20))
    assert engine.executor.num_computed_tokens == 200 + 19 * (200 - shared) + num_decoded
    assert [engine.num_cached(f"r{i}") for i in range(20)] == [0, *[shared] * 19]


def test_when_the_writer_is_aborted_one_waiter_becomes_the_writer() -> None:
    engine = OracleEngine(max_num_seqs=8)
    for name in ("writer", "one", "two"):
        engine.add(name, LONG)
    engine.step()
    engine.core.handle(AbortRequests(("writer",)))
    engine.run()
    expected = lone_answer(LONG, b"", 4)
    assert [engine.tokens(name) for name in ("one", "two")] == [expected, expected]
    # What the writer had committed is hit; the rest is computed once.
    assert (engine.num_cached("one"), engine.num_cached("two")) == (64, 192)


def test_a_waiter_can_be_aborted() -> None:
    engine = OracleEngine()
    engine.add("writer", LONG)
    engine.add("waiter", LONG)
    engine.step()
    engine.core.handle(AbortRequests(("waiter", "nobody")))
    engine.run()
    assert engine.tokens("writer") == lone_answer(LONG, b"", 4)
    assert "waiter" not in engine.outputs


def test_thousands_of_identical_prompts_finish_in_a_pool_of_one_prefix_and_few_tails() -> None:
    engine = OracleEngine(num_blocks=12 + 5, max_num_seqs=64)
    for index in range(2000):
        engine.add(f"r{index}", LONG, max_tokens=3)
    engine.run()
    expected = lone_answer(LONG, b"", 3)
    assert all(engine.tokens(f"r{i}") == expected for i in range(2000))
    widest = max(len(step.requests) for step in engine.executor.steps)
    assert widest == 5  # as many as there are tails
    assert engine.core.scheduler.totals.num_preemptions == 0


def test_without_room_the_youngest_is_preempted_and_answers_all_the_same() -> None:
    engine = OracleEngine(num_blocks=8, max_num_seqs=4)
    prompts = {name: [n, *range(10, 40)] for n, name in enumerate(("a", "b", "c"))}
    for name, prompt in prompts.items():
        engine.add(name, prompt, max_tokens=50, params=params(max_tokens=50, ignore_eos=True))
    engine.run()
    assert engine.core.scheduler.totals.num_preemptions > 0
    for name, prompt in prompts.items():
        answer = engine.tokens(name)
        assert answer == lone_answer(prompt, b"", 50)[: len(answer)]


def test_priority_goes_before_arrival() -> None:
    engine = OracleEngine(max_num_seqs=1, policy="priority")
    engine.add("running", [1, 2], priority=5, max_tokens=2)
    engine.step()
    engine.add("late", [3, 4], priority=9, max_tokens=1)
    engine.add("soon", [5, 6], priority=1, max_tokens=1)
    engine.run()
    order = [step.requests[0].request_id for step in engine.executor.steps]
    assert order.index("soon") < order.index("late")


@pytest.mark.parametrize("policy", ["fcfs"])
def test_fcfs_ignores_priority(policy: str) -> None:
    engine = OracleEngine(max_num_seqs=1, policy=policy)
    engine.add("first", [3, 4], priority=9, max_tokens=1)
    engine.add("second", [5, 6], priority=1, max_tokens=1)
    engine.run()
    order = [step.requests[0].request_id for step in engine.executor.steps]
    assert order == ["first", "second"]


def test_max_tokens_of_zero_computes_the_prompt_and_draws_nothing() -> None:
    engine = OracleEngine()
    engine.add("a", LONG, params=params(max_tokens=0))
    engine.run()
    assert engine.tokens("a") == []
    assert engine.last("a").finish_reason == "length"


def test_prompt_logprobs_come_for_every_prompt_token_even_when_cached() -> None:
    engine = OracleEngine()
    engine.add("warm", LONG)
    engine.run()
    engine.add("a", LONG, params=params(prompt_logprobs=0))
    engine.run()
    told = [entry.token_id for o in engine.outputs["a"] for entry in o.prompt_logprobs]
    assert told == LONG[1:]
    assert engine.num_cached("a") == 0


@pytest.mark.parametrize(
    ("start", "num_cached"), [(0, 0), (31, 16), (32, 32), (33, 32), (len(LONG) - 1, 192)]
)
def test_what_stands_before_the_first_prompt_logprob_asked_for_may_be_cached(
    start: int, num_cached: int
) -> None:
    engine = OracleEngine()
    engine.add("warm", LONG)
    engine.run()
    engine.add("a", LONG, params=params(prompt_logprobs=0, prompt_logprob_start=start))
    engine.run()
    told = [entry for output in engine.outputs["a"] for entry in output.prompt_logprobs]
    assert told == lone_prompt_logprobs(LONG, b"", start)
    assert engine.num_cached("a") == num_cached


def test_prompt_logprobs_are_told_once_across_a_preemption() -> None:
    engine = OracleEngine(num_blocks=11, max_num_batched_tokens=20)
    engine.add("old", [5, *range(20, 30)], params=params(max_tokens=150, ignore_eos=True))
    engine.step()
    engine.add("a", LONG[:150], params=params(prompt_logprobs=0, max_tokens=20))
    engine.run()
    assert engine.core.scheduler.totals.num_preemptions > 0
    told = [entry for output in engine.outputs["a"] for entry in output.prompt_logprobs]
    assert told == lone_prompt_logprobs(LONG[:150], b"", 0)


def test_stop_tokens_end_an_answer_but_not_before_min_tokens() -> None:
    answer = lone_answer(LONG, b"", 8)
    assert EOS not in answer
    engine = OracleEngine()
    engine.add("stop", LONG, params=params(max_tokens=8, stop_token_ids=(answer[2],)))
    engine.add("min", LONG, params=params(max_tokens=8, stop_token_ids=(answer[2],), min_tokens=5))
    engine.run()
    assert engine.tokens("stop") == answer[:3]
    assert engine.last("stop").stop_token_id == answer[2]
    told = engine.tokens("min")
    assert (len(told), told[:2]) == (8, answer[:2])
    assert answer[2] not in told[:5]
    banned = [
        sample.banned_token_ids
        for s in engine.executor.steps
        if s.requests and s.requests[0].request_id == "min"
        for sample in s.requests[0].asked.samples
    ]
    assert tuple(banned[0]) == (EOS, answer[2])
    assert banned[1] is banned[0], "made once a request, not once a step"
    assert banned[-1] == ()


def test_a_reset_makes_the_next_request_cold() -> None:
    engine = OracleEngine()
    engine.add("warm", LONG)
    engine.run()
    engine.core.handle(ResetPrefixCache(1))
    engine.add("cold", LONG)
    engine.run()
    engine.add("hit", LONG)
    engine.run()
    assert (engine.num_cached("cold"), engine.num_cached("hit")) == (0, 192)


def test_a_request_that_ran_across_a_reset_offers_nothing() -> None:
    engine = OracleEngine(max_num_batched_tokens=16)
    engine.add("runs", LONG)
    engine.step()
    engine.add("waits", LONG)
    engine.step()
    engine.core.handle(ResetPrefixCache(1))
    engine.run()
    assert engine.num_cached("waits") == 0
    expected = lone_answer(LONG, b"", 4)
    assert (engine.tokens("runs"), engine.tokens("waits")) == (expected, expected)


def test_generated_tokens_are_hit_by_the_next_turn() -> None:
    engine = OracleEngine()
    engine.add("turn one", LONG[:20], params=params(max_tokens=60, ignore_eos=True))
    engine.run()
    answer = engine.tokens("turn one")
    engine.add("turn two", [*LONG[:20], *answer, 11])
    engine.run()
    assert engine.num_cached("turn two") == (20 + len(answer) - 1) // 16 * 16


def test_without_prefix_caching_nothing_is_hit_or_deferred() -> None:
    engine = OracleEngine(enable_prefix_caching=False)
    engine.add("a", LONG)
    engine.add("b", LONG)
    engine.step()
    assert engine.core.scheduler.num_deferred == 0
    engine.run()
    assert (engine.num_cached("a"), engine.num_cached("b")) == (0, 0)


def test_embeds_of_one_length_share_no_kv_and_equal_first_rows_do() -> None:
    rows = [bytes([i] * 8) for i in range(40)]
    other = [bytes([i + 100] * 8) for i in range(40)]
    engine = OracleEngine()
    for name, embeds in (("a", rows), ("b", other), ("c", [*rows[:35], *other[:5]])):
        engine.add(name, [], embeds_rows=embeds)
        engine.run()
        assert engine.tokens(name) == lone_answer([0] * 40, b"", 4, embeds)
    assert [engine.num_cached(name) for name in "abc"] == [0, 0, 32]
    engine.add("text", [0] * 40)
    engine.run()
    assert engine.num_cached("text") == 0


def test_penalties_see_the_prompt_and_the_answer_so_far_but_no_embeddings() -> None:
    engine = OracleEngine()
    penalised = params(repetition_penalty=1.2, ignore_eos=True)
    engine.add("text", [3, 4, 5], params=penalised)
    engine.add("embeds", [], embeds_rows=[b"12345678"] * 3, params=penalised)
    engine.add("mixed", [3, 0, 4], embeds_rows=[b"", b"12345678", b""], params=penalised)
    engine.run()
    last = {r.request_id: r.asked.samples for r in engine.executor.steps[-1].requests}
    for name, prompt in (("text", [3, 4, 5]), ("embeds", []), ("mixed", [3, 4])):
        (sample,) = last[name]
        drawn = Counter(engine.tokens(name)[:-1])
        seen = dict(zip(sample.seen.token_ids, sample.seen.num_drawn, strict=True))
        assert seen == {token_id: drawn[token_id] for token_id in (*prompt, *drawn)}


def test_aborted_requests_leave_the_queue_even_behind_others() -> None:
    engine = OracleEngine(max_num_seqs=1, num_blocks=200)
    engine.add("first", LONG, max_tokens=30)
    engine.step()
    for index in range(100):
        engine.add(f"w{index}", LONG)
    engine.core.handle(AbortRequests(tuple(f"w{i}" for i in range(100) if i % 10)))
    assert engine.core.scheduler.num_waiting == 10
    engine.run()
    assert [name for name in engine.outputs if name != "first"] == [
        f"w{i}" for i in range(0, 100, 10)
    ]


def test_a_request_sent_twice_runs_once() -> None:
    engine = OracleEngine()
    engine.add("a", LONG)
    engine.add("a", LONG)
    engine.run()
    assert engine.tokens("a") == lone_answer(LONG, b"", 4)
