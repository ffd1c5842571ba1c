"""Whom drafts are given, and how many: what is left of a step, and no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from lora_serve.config import SpeculativeConfig
from lora_serve.fuzz.oracle.drafts import DraftWatch
from lora_serve.fuzz.oracle.engine import OracleEngine
from lora_serve.fuzz.oracle.grammars import toy_constraint
from lora_serve.fuzz.oracle.lone_answers import lone_answer
from lora_serve.messages import AbortRequests
from lora_serve.sampling_params import SamplingParams
from lora_serve.scheduler import drafting as drafting_module
from lora_serve.scheduler.request import Request
from lora_serve.speculation.base import Origin
from lora_serve.speculation.pace import DraftPace
from lora_serve.speculation.row_costs import RowCosts
from lora_serve.speculation.suffix import SuffixRequestDrafter
from lora_serve.step import NOTHING_SEEN, SchedulerOutput, SeenTokens
from tests.fakes.drafting import MadeUpDrafts, drafting

PROMPT = [10 + i % 40 for i in range(90)]


def engine(max_step_rows: int = 16, **settings: Any) -> OracleEngine:
    """Drafts past answers. max_step_rows: as of SpeculativeConfig."""
    speculative = SpeculativeConfig(
        speculative_method="suffix",
        speculative_num_speculative_tokens=8,
        speculative_max_step_rows=max_step_rows,
        speculative_suffix_decoding_max_spec_factor=8.0,
    )
    return OracleEngine(speculative=speculative, **settings)


def num_drafts(step: SchedulerOutput) -> list[int]:
    return [chunk.asked.num_drafts for chunk in step.requests]


def answered_before(engine: OracleEngine, max_tokens: int = 40) -> OracleEngine:
    """The same engine, where the prompt's answer can be drafted."""
    engine.add("before", PROMPT, max_tokens=max_tokens)
    engine.run()
    engine.executor.steps.clear()
    engine._num_watched = 0
    return engine


def test_an_answer_that_was_given_before_takes_fewer_steps() -> None:
    repeated = answered_before(engine())
    repeated.add("again", PROMPT, max_tokens=40)
    repeated.run()
    assert repeated.tokens("again") == repeated.tokens("before") == lone_answer(PROMPT, b"", 40)
    assert len(repeated.executor.steps) < 12


def test_a_step_gets_drafts_until_it_samples_so_many_rows() -> None:
    crowded = answered_before(engine(max_step_rows=6, max_num_seqs=8))
    for index in range(4):
        crowded.add(f"r{index}", PROMPT, max_tokens=40)
    crowded.run()
    most = [len(step.requests) + sum(num_drafts(step)) for step in crowded.executor.steps]
    assert max(rows for rows in most if rows < 60) == 6
    assert all(crowded.tokens(f"r{i}") == lone_answer(PROMPT, b"", 40) for i in range(4))


def test_the_tokens_that_penalties_have_seen_are_copied_once_for_each_draft(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not for each pair of them: a step of 64 drafts took 35 ms of a request's 30,000 tokens."""
    params = SamplingParams(max_tokens=40, seed=1, presence_penalty=0.5)
    repeated = engine()
    repeated.add("before", PROMPT, params=params)
    repeated.run()
    repeated.executor.steps.clear()
    copied, and_drawn = [], SeenTokens.and_drawn

    def counted(seen: SeenTokens, token_id: int) -> SeenTokens:
        copied.append(token_id)
        return and_drawn(seen, token_id)

    monkeypatch.setattr(SeenTokens, "and_drawn", counted)
    repeated.add("again", PROMPT, params=params)
    repeated.run()
    assert repeated.tokens("again") == repeated.tokens("before")
    chunks = [chunk for step in repeated.executor.steps for chunk in step.requests]
    assert len(copied) == sum(chunk.asked.num_drafts for chunk in chunks) > 20
    for chunk in chunks:
        seen = chunk.asked.samples[0].seen if chunk.asked.samples else NOTHING_SEEN
        for draft, sample in zip(chunk.draft_token_ids, chunk.asked.samples[1:], strict=True):
            seen = and_drawn(seen, draft)
            assert sample.seen == seen


def test_drafters_take_in_long_prompts_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many tokens a step computes, or finds cached: what they take in delays the next."""
    taken, take_in = Counter[int](), SuffixRequestDrafter.take_in
    prompts = [[10 + (i * i + which) % 40 for i in range(3000)] for which in range(3)]
    busy = engine(num_blocks=1000, max_num_batched_tokens=4096)

    def counted(drafter: SuffixRequestDrafter, token_ids: Sequence[int], most: int) -> int:
        num_taken = take_in(drafter, token_ids, most)
        taken[len(busy.executor.steps)] += num_taken
        return num_taken

    monkeypatch.setattr(SuffixRequestDrafter, "take_in", counted)
    for which, prompt in enumerate(prompts):
        busy.add(f"r{which}", prompt, max_tokens=60)
    busy.run()
    assert 1024 <= max(taken.values()) < 1100
    assert taken.total() > 3 * 3000
    assert any(any(num_drafts(step)) for step in busy.executor.steps)


def test_rows_that_one_request_leaves_are_given_to_others() -> None:
    shared = answered_before(engine(max_step_rows=8, max_num_seqs=8))
    shared.add("unknown", [500 + i for i in range(20)], max_tokens=40)
    shared.add("known", PROMPT, max_tokens=40)
    shared.run()
    assert [0, 6] in [num_drafts(step) for step in shared.executor.steps]


def test_drafts_take_no_block_that_a_running_request_needs_next() -> None:
    """There are as many blocks as the two need; drafts behind the first want one more."""
    stopping = SamplingParams(max_tokens=30, seed=1, stop_token_ids=lone_answer(PROMPT, b"", 4)[3:])
    with drafting(lambda request: [7] * 8) as counts:  # wrong ones
        tight = OracleEngine(num_blocks=12, max_num_seqs=2)
    tight.add("first", PROMPT, params=stopping)
    tight.add("second", PROMPT[10:], max_tokens=10)
    tight.run()
    assert counts.num_rejected > 0
    assert tight.core.scheduler.totals.num_preemptions == 0
    assert tight.tokens("second") == lone_answer(PROMPT[10:], b"", 10)


def test_only_so_many_requests_have_drafters_at_once() -> None:
    many = engine(max_step_rows=2, max_num_seqs=16, num_blocks=200, max_num_batched_tokens=24)
    for index in range(8):
        many.add(f"r{index}", [*range(100 * index, 100 * index + 50)], max_tokens=60)
    owner = many.core.scheduler._drafting
    assert owner is not None
    most = 0
    for number in range(2000):
        if not many.step():
            break
        most = max(most, owner._num_drafters)
        if number == 30:
            many.core.handle(AbortRequests(("r0", "r1")))
    assert most == 4
    assert owner._num_drafters == 0


def num_rows_by_costs(costs: RowCosts | None, max_tokens: int = 100) -> list[int]:
    """The rows of each step that decodes, of an answer that was given before."""
    repeated = answered_before(engine(row_costs=costs), max_tokens)
    repeated.add("again", PROMPT, max_tokens=max_tokens)
    repeated.run()
    assert repeated.tokens("again") == lone_answer(PROMPT, b"", max_tokens)
    decodes = [step for step in repeated.executor.steps if step.requests[0].start >= len(PROMPT)]
    return [step.num_tokens for step in decodes]


def test_guesses_take_no_more_rows_than_are_worth_their_time() -> None:
    free = num_rows_by_costs(RowCosts([(1, 1.0), (16, 1.0)]))
    assert free == num_rows_by_costs(None)
    assert max(free) == 9
    stepped = num_rows_by_costs(RowCosts([(1, 1.0), (5, 1.1), (6, 9.0)]))
    assert (max(stepped), len(stepped)) == (5, pytest.approx(100 / 5, abs=4))


def test_where_each_row_costs_as_much_as_the_first_a_guess_is_tried_now_and_then() -> None:
    dear = num_rows_by_costs(RowCosts([(1, 1.0), (2, 2.0)]))
    assert sorted(set(dear)) == [1, 2]
    assert dear.count(2) == 2  # of 100 tokens


FREE, DEAR = [(1, 1.0), (16, 1.0)], [(1, 1.0), (2, 2.0)]


@pytest.mark.parametrize(
    ("greedy", "drawn", "temperature", "most"),
    [(FREE, DEAR, 1.0, 2), (DEAR, FREE, 1.0, 9), (FREE, DEAR, 0.0, 9), (DEAR, FREE, 0.0, 2)],
)
def test_rows_of_steps_that_draw_have_costs_of_their_own(
    greedy: list[tuple[int, float]],
    drawn: list[tuple[int, float]],
    temperature: float,
    most: int,
) -> None:
    repeated = engine(row_costs=RowCosts(greedy, drawn=drawn))
    params = SamplingParams(max_tokens=60, seed=1, temperature=temperature)
    for name in ("before", "again"):
        repeated.executor.steps.clear()
        repeated.add(name, PROMPT, params=params)
        repeated.run()
    decodes = [step for step in repeated.executor.steps if step.requests[0].start >= len(PROMPT)]
    assert max(step.num_tokens for step in decodes) == most


# ── what others may learn, and do ───────────────────────────────────────────────────────────────


def steps_of_another(
    was_answered: bool, whose: dict[str, str], other: dict[str, str]
) -> list[tuple[int, list[int]]]:
    """The tokens and drafts of each step of a request that `other` asks.

    was_answered: whether the same prompt has been asked for `whose` before.
    """
    one = engine(max_num_seqs=4)
    if was_answered:
        one.add("theirs", PROMPT, max_tokens=40, **whose)  # type: ignore[arg-type]
        one.run()
        one.executor.steps.clear()
        one._num_watched = 0
    one.add("own", PROMPT, max_tokens=40, **other)  # type: ignore[arg-type]
    one.run()
    assert one.tokens("own") == lone_answer(PROMPT, b"", 40)
    return [(step.num_tokens, num_drafts(step)) for step in one.executor.steps]


# The server mixes the API key into the salt, so that tenants differ in it, too.
THEIRS = {"tenant": "theirs", "salt": "theirs"}


@pytest.mark.parametrize(
    "other", [{"tenant": "other", "salt": "other"}, {"tenant": "theirs", "salt": "other"}, {}]
)
def test_no_step_tells_a_tenant_what_another_was_answered(other: dict[str, str]) -> None:
    """Time would: the steps and their rows are as many as if it had never been asked."""
    assert steps_of_another(True, THEIRS, other) == steps_of_another(False, THEIRS, other)
    assert steps_of_another(True, other, other) != steps_of_another(False, other, other)


@pytest.mark.parametrize("of_any", ["tenant", "salt"])
def test_steps_would_tell_of_drafts_that_tenants_share(
    of_any: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = drafting_module._origin

    def shared(request: Request) -> Origin:
        origin = right(request)
        namespace = replace(origin.namespace, cache_salt="") if of_any == "salt" else None
        return Origin(namespace or origin.namespace)

    monkeypatch.setattr(drafting_module, "_origin", shared)
    monkeypatch.setattr(DraftWatch, "check", lambda self, steps: None)  # it would see them itself
    other = {"tenant": "other", "salt": "other" if of_any == "salt" else "theirs"}
    assert steps_of_another(True, THEIRS, other) != steps_of_another(False, THEIRS, other)


def misled(request: Request) -> list[int]:
    """Guess what the answer never holds."""
    return [10**6] * 8


def test_guesses_that_are_always_wrong_cost_few_rows() -> None:
    with drafting(misled, DraftPace) as counts:
        one = OracleEngine(num_blocks=64, max_num_seqs=2)
    one.add("misled", PROMPT, max_tokens=400)
    one.run()
    answer = one.tokens("misled")
    assert answer == lone_answer(PROMPT, b"", 400)
    num_sampling = sum(bool(step.requests[0].asked.samples) for step in one.executor.steps)
    assert num_sampling == len(answer) > 100, "no step is lost, and none won"
    num_rows = sum(step.num_tokens for step in one.executor.steps)
    assert num_rows - len(PROMPT) - (len(answer) - 1) == counts.num_rejected
    assert 8 < counts.num_rejected < len(answer) // 6


def test_no_neighbour_gets_less_of_a_step_for_guesses_that_are_wrong() -> None:
    """Not even where each request is new, and so is what it was wrong about."""

    def neighbours_steps(drafts: MadeUpDrafts) -> list[int]:
        with drafting(drafts, DraftPace):
            one = OracleEngine(num_blocks=80, max_num_seqs=4)
        one.add("neighbour", PROMPT, max_tokens=60)
        for index in range(20):
            one.add(f"misled{index}", [*PROMPT, index], max_tokens=6)
        one.run()
        assert one.core.scheduler.totals.num_preemptions == 0
        return [
            position
            for position, step in enumerate(one.executor.steps)
            for chunk in step.requests
            if chunk.request_id.startswith("neighbour")
        ]

    assert neighbours_steps(misled) == neighbours_steps(lambda request: [])


FORCED = toy_constraint(1, 40, forced=90)
RIGHT = lone_answer(PROMPT, b"", 40, constraint=FORCED)


def held(max_tokens: int = 40) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=1, structured_outputs=FORCED)


def forced_engine(**speculative: Any) -> OracleEngine:
    """Guesses nothing."""
    return OracleEngine(speculative=SpeculativeConfig(**speculative), max_num_seqs=8)


@pytest.mark.parametrize(
    ("speculative", "num_steps", "num_drafts"), [({"speculation": "off"}, 41, 0), ({}, 7, 34)]
)
def test_tokens_that_a_grammar_forces_take_one_step_together(
    speculative: dict[str, str], num_steps: int, num_drafts: int
) -> None:
    alone = forced_engine(**speculative)
    alone.add("r", PROMPT, params=held())
    alone.run()
    assert alone.tokens("r") == RIGHT
    assert len(RIGHT) == 40
    totals = alone.core.scheduler.totals
    assert totals.num_steps == num_steps
    assert totals.num_accepted_tokens == totals.num_draft_tokens == num_drafts


def test_forced_tokens_come_before_guesses_and_leave_them_the_rest_of_the_rows() -> None:
    mixed = answered_before(engine(max_step_rows=8))
    mixed.add("guessed", PROMPT, max_tokens=40)
    mixed.add("held", PROMPT, params=held())
    mixed.run()
    assert mixed.tokens("guessed") == lone_answer(PROMPT, b"", 40)
    assert mixed.tokens("held") == RIGHT
    steps = [num_drafts(step) for step in mixed.executor.steps if len(step.requests) == 2]
    assert any(guessed and forced for guessed, forced in steps)
    assert max(forced for _, forced in steps) == 6
    assert all(sum(step) <= 6 for step in steps)


def test_no_forced_token_is_drafted_behind_the_last_token_of_an_answer() -> None:
    short = forced_engine()
    short.add("r", PROMPT, params=held(max_tokens=3))
    short.run()
    assert short.tokens("r") == RIGHT[:3]
    assert short.core.scheduler.totals.num_draft_tokens <= 2
