"""Which requests are served when adapters or tenants compete, by the oracle's computed tokens."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from lora_serve.fuzz.oracle.engine import OracleEngine
from lora_serve.fuzz.oracle.lone_answers import lone_answer
from lora_serve.identity import BASE_MODEL
from lora_serve.sampling_params import SamplingParams
from lora_serve.scheduler.queue import OVERTAKE_LIMIT
from lora_serve.scheduler.shares import FairShares

MAX_PROMPT, MAX_ANSWER, MAX_RUNNING = 60, 30, 3
# A share may be ahead by what runs for it, and by one request that was let in at an equal count.
BOUND = (MAX_RUNNING + 1) * (MAX_PROMPT + MAX_ANSWER)


def flood(engine: OracleEngine, seed: int, fair_share: str) -> dict[str, str]:
    """Three shares, each with more than can be done at once; the first one's all came first."""
    rng = random.Random(seed)
    names = ("hot", "warm", "cold")
    for name in names:
        engine.load(name, f"/{name}", name)
        engine.step()
    owners: dict[str, str] = {}
    for name, count in zip(names, (150, 60, 60), strict=True):
        for number in range(count):
            prompt = [rng.randrange(8, 500) for _ in range(rng.randrange(1, MAX_PROMPT))]
            request_id = f"{name}{number}"
            owners[request_id] = name
            engine.add(
                request_id,
                prompt,
                lora_name=name if fair_share == "adapter" else BASE_MODEL,
                tenant=name,
                max_tokens=rng.randrange(1, MAX_ANSWER),
            )
    return owners


def largest_gap(seed: int, fair_share: str, max_loras: int = 3) -> int:
    """How far the computed tokens of any two shares were apart while all had requests waiting."""
    engine = OracleEngine(
        num_blocks=200, max_num_seqs=MAX_RUNNING, max_loras=max_loras, fair_share=fair_share
    )
    owners = flood(engine, seed, fair_share)
    num_left = dict.fromkeys(("warm", "cold"), 60)
    tokens = dict.fromkeys(("hot", "warm", "cold"), 0)
    gap, num_seen = 0, len(engine.executor.steps)
    seen: set[str] = set()
    while all(num_left.values()):
        engine.step()
        for step in engine.executor.steps[num_seen:]:
            for request in step.requests:
                owner = owners[request.request_id]
                tokens[owner] += request.num_tokens
                if owner in num_left and request.request_id not in seen:
                    num_left[owner] -= 1
                seen.add(request.request_id)
        num_seen = len(engine.executor.steps)
        gap = max(gap, max(tokens.values()) - min(tokens.values()))
    return gap


@pytest.mark.parametrize("fair_share", ["adapter", "key"])
def test_competing_shares_stay_within_a_few_requests_of_each_other(fair_share: str) -> None:
    assert max(largest_gap(seed, fair_share) for seed in range(2)) <= BOUND


def test_without_shares_the_order_of_arrival_rules() -> None:
    assert largest_gap(0, "none") > 5 * BOUND


def test_adapters_without_a_slot_wait_for_a_turn_of_bounded_length() -> None:
    turn = OVERTAKE_LIMIT * (MAX_PROMPT + MAX_ANSWER)
    assert largest_gap(0, "adapter", max_loras=1) <= BOUND + turn
    assert largest_gap(0, "none", max_loras=1) > BOUND + turn, "it is not the LoRA slots that do it"


class NeverCharges(FairShares):
    def charge(self, share: str, num_tokens: int) -> None:
        pass


def test_a_queue_that_does_not_charge_is_found_out() -> None:
    """The bound above can fail: with counts that never grow, the hot share has everything."""
    engine = OracleEngine(num_blocks=200, max_num_seqs=MAX_RUNNING, fair_share="key")
    engine.core.scheduler._queue._shares = NeverCharges()
    owners = flood(engine, 0, "key")
    for _ in range(200):
        engine.step()
    begun = {owners[request_id] for request_id in engine.outputs}
    assert begun == {"hot"}


def test_a_share_that_comes_late_does_not_wait_for_the_crowd_before_it() -> None:
    for fair_share, is_soon in (("key", True), ("none", False)):
        engine = OracleEngine(num_blocks=200, max_num_seqs=2, fair_share=fair_share)
        for number in range(100):
            engine.add(f"crowd{number}", [9] * (20 + number), tenant="crowd", max_tokens=8)
        for _ in range(20):
            engine.step()
        engine.add("late", list(range(10, 40)), tenant="late", max_tokens=2)
        for _ in range(12):
            engine.step()
        assert ("late" in engine.outputs) is is_soon
        engine.run()


def steps_until_a_late_share_begins(
    fair_share: str, *, async_scheduling: bool = False, **late: Any
) -> int:
    """How many steps a share waits that comes when others' long answers fill all places."""
    engine = OracleEngine(
        num_blocks=200,
        max_num_seqs=4,
        fair_share=fair_share,
        policy="priority",
        async_scheduling=async_scheduling,
    )
    for number in range(4):
        engine.add(f"crowd{number}", [9] * (20 + number), tenant="crowd", max_tokens=60)
    for _ in range(12):
        engine.step()
    engine.add("late", list(range(10, 40)), tenant="late", max_tokens=2, **late)
    num_steps = 0
    while "late" not in engine.outputs:
        engine.step()
        num_steps += 1
    engine.run()
    return num_steps


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["one by one", "overlapped"])
def test_a_request_gives_way_to_a_share_that_has_nothing_running(async_scheduling: bool) -> None:
    waited = [
        steps_until_a_late_share_begins(fair_share, async_scheduling=async_scheduling)
        for fair_share in ("key", "none")
    ]
    assert waited[0] < 0.6 * waited[1]


def test_no_request_gives_way_to_one_of_worse_priority() -> None:
    assert steps_until_a_late_share_begins("key", priority=1) > 15


def test_a_share_keeps_its_last_place() -> None:
    """Two shares on two places: neither gives way to a third, and both go on to their ends."""
    engine = OracleEngine(num_blocks=200, max_num_seqs=2, fair_share="key")
    for name in ("a", "b", "c"):
        engine.add(name, [9] * 20, tenant=name, max_tokens=30)
        engine.step()
    engine.run()
    assert engine.core.scheduler.totals.num_preemptions == 0


@dataclass(frozen=True)
class CrowdBefore:
    """A crowd on all places, until a share began for which a prompt was computed before.

    num_computed: tokens of the crowd meanwhile. num_answered: those that its answers got.
    """

    num_steps: int
    num_preemptions: int
    num_computed: int
    num_answered: int


def wait_behind_a_crowd(first_prompt: int, crowd_prompt: int = 20, **settings: Any) -> CrowdBefore:
    """Let a share come back that has had a prompt of so many tokens computed."""
    engine = OracleEngine(
        num_blocks=400,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        fair_share="key",
        **settings,
    )
    engine.add("before", [8 + i % 480 for i in range(first_prompt)], tenant="y", max_tokens=1)
    for number in range(4):
        prompt = [(100 + 40 * number + i) % 480 + 8 for i in range(crowd_prompt)]
        params = SamplingParams(max_tokens=700, min_tokens=700, seed=number)
        engine.add(f"crowd{number}", prompt, tenant="x", params=params)
    while engine.core.scheduler.num_running < 4:
        engine.step()
    engine.add("late", list(range(300, 330)), tenant="y", max_tokens=2)
    num_before, num_steps = len(engine.executor.steps), 0
    while "late" not in engine.outputs and num_steps < 300:
        engine.step()
        num_steps += 1
    chunks = [
        chunk
        for step in engine.executor.steps[num_before:]
        for chunk in step.requests
        if chunk.request_id.startswith("crowd")
    ]
    return CrowdBefore(
        num_steps,
        engine.core.scheduler.totals.num_preemptions,
        sum(chunk.num_tokens for chunk in chunks),
        sum(bool(chunk.asked.samples) for chunk in chunks),
    )


@pytest.mark.parametrize("async_scheduling", [False, True], ids=["one by one", "overlapped"])
def test_a_share_that_has_got_more_waits_for_its_turn(async_scheduling: bool) -> None:
    waited = wait_behind_a_crowd(600, async_scheduling=async_scheduling)
    assert 120 < waited.num_steps < 180, "its turn comes when the crowd has got as much"
    assert waited.num_preemptions == 1
    assert waited.num_answered > 3.9 * (waited.num_steps - 10), "no step was for nothing"


def test_a_share_that_has_got_more_costs_the_crowd_nothing_where_nothing_is_cached() -> None:
    waited = wait_behind_a_crowd(3000, 400, enable_prefix_caching=False)
    assert (waited.num_steps, waited.num_preemptions) == (300, 0)
    assert waited.num_answered == 4 * 300
    assert waited.num_computed - waited.num_answered < 400, "a prompt was computed again"


def test_a_request_gives_way_once_the_weights_of_the_other_are_there() -> None:
    engine = OracleEngine(
        max_num_seqs=2, max_loras=2, max_cpu_loras=2, fair_share="adapter", load_delay=20
    )
    for name in ("evicted", "other", "crowd"):
        engine.load(name, f"/{name}", name)
        for _ in range(40):
            engine.step()
    for number in range(2):
        prompt = list(range(100 + 40 * number, 120 + 40 * number))
        engine.add(f"crowd{number}", prompt, lora_name="crowd", max_tokens=60)
    for _ in range(8):
        engine.step()
    engine.add("late", list(range(300, 330)), lora_name="evicted", max_tokens=2)
    num_preemptions = []
    while "late" not in engine.outputs:
        engine.step()
        num_preemptions.append(engine.core.scheduler.totals.num_preemptions)
    assert len(num_preemptions) > 20
    assert num_preemptions == [0] * (len(num_preemptions) - 1) + [1]


def test_a_request_gives_way_once_another_has_computed_what_both_begin_with() -> None:
    engine = OracleEngine(
        num_blocks=100, max_num_seqs=2, max_num_batched_tokens=16, fair_share="key"
    )
    prompts = [list(range(8 + 100 * number, 104 + 100 * number)) for number in range(2)]
    for number, prompt in enumerate(prompts):
        engine.add(f"crowd{number}", prompt, tenant="crowd", max_tokens=60)
    scheduler = engine.core.scheduler
    while scheduler.num_running < 2:
        engine.step()
    engine.add("late", [*prompts[1], 9], tenant="late", max_tokens=2)
    num_preemptions = []
    while scheduler.num_deferred or not num_preemptions:
        engine.step()
        num_preemptions.append(scheduler.totals.num_preemptions)
    assert num_preemptions == [0] * len(num_preemptions)
    assert len(num_preemptions) > 2
    engine.run()
    assert scheduler.totals.num_preemptions == 1
    assert engine.num_cached("late") == 96


def test_no_request_gives_way_to_one_for_which_there_are_too_few_blocks() -> None:
    engine = OracleEngine(num_blocks=12, max_num_seqs=2, fair_share="key")
    for number in range(2):
        engine.add(f"crowd{number}", [9 + number] * 20, tenant="crowd", max_tokens=60)
    for _ in range(8):
        engine.step()
    engine.add("late", [11] * 170, tenant="late", max_tokens=2)
    engine.run()
    assert engine.core.scheduler.totals.num_preemptions == 0


def test_a_request_that_gave_way_once_resumes_first_when_blocks_were_short() -> None:
    engine = OracleEngine(num_blocks=12, max_num_seqs=2, fair_share="key")
    params = SamplingParams(max_tokens=100, min_tokens=100, seed=1)
    for number in range(2):
        engine.add(f"crowd{number}", [9 + number] * 20, tenant="crowd", params=params)
    for _ in range(8):
        engine.step()
    totals = engine.core.scheduler.totals
    engine.add("late", [11] * 5, tenant="late", max_tokens=2)
    while "late" not in engine.outputs:
        engine.step()
    assert totals.num_preemptions == 1
    engine.add("large", [12] * 170, tenant="large", max_tokens=2)
    engine.run()
    assert totals.num_preemptions == 2, "blocks were not short"
    order = {name: outputs[-1].finish_reason for name, outputs in engine.outputs.items()}
    assert list(order)[-1] == "large"
    begun = [step.requests[0].request_id for step in engine.executor.steps if step.requests]
    assert begun.index("large") > max(i for i, name in enumerate(begun) if name == "crowd1")


def test_priority_goes_before_fairness() -> None:
    engine = OracleEngine(num_blocks=200, max_num_seqs=1, policy="priority", fair_share="key")
    for number in range(6):
        engine.add(f"a{number}", [9] * 30, tenant="a", priority=0)
    engine.add("b", [8] * 30, tenant="b", priority=1)
    engine.run()
    order = list(engine.outputs)
    assert order[-1] == "b"


def test_a_preempted_request_resumes_before_those_that_have_not_begun() -> None:
    engine = OracleEngine(num_blocks=8, max_num_seqs=2, fair_share="key")
    first, second = list(range(10, 60)), list(range(110, 160))
    engine.add("first", first, tenant="a", max_tokens=40)
    engine.add("second", second, tenant="a", max_tokens=40)
    engine.add("other", list(range(210, 260)), tenant="b", max_tokens=4)
    engine.run()
    assert engine.core.scheduler.totals.num_preemptions > 0
    finished = [name for name, outputs in engine.outputs.items() if outputs[-1].finish_reason]
    assert set(finished) == {"first", "second", "other"}
    assert engine.tokens("second") == lone_answer(second, b"", 40)
