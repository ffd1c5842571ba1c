"""The random lives of tests/test_traces.py, where answers are held to grammars, and the bugs that
the traces would catch. Each mutant puts one back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from lora_serve.bitmask import bitmask_of
from lora_serve.engine.core import grammars
from lora_serve.fuzz.oracle.content import EOS, VOCAB_SIZE
from lora_serve.fuzz.oracle.grammars import OracleGrammars, _ToyAnswer
from lora_serve.fuzz.oracle.traces import OracleTrace
from lora_serve.scheduler import chunk, drafting
from lora_serve.scheduler.request import Request
from lora_serve.scheduler.scheduler import Scheduler
from lora_serve.structured_output.service import MaskReply
from lora_serve.structured_outputs import MaskedDrafts

NUM_TRACES = 30

OVERLAPS = pytest.mark.parametrize(
    "async_scheduling", [False, True], ids=["one by one", "overlapped"]
)


@dataclass
class Lives:
    """What the traces came to, added up. The three after num_complete count samples of requests
    that reason.
    """

    wrong: list[str] = field(default_factory=list)
    num_held: int = 0
    num_preempted: int = 0
    num_complete: int = 0
    num_open: int = 0
    num_begun: int = 0
    num_held_after: int = 0
    num_forced: int = 0
    num_guessed: int = 0

    def add(self, seed: int, trace: OracleTrace) -> None:
        self.wrong += [f"seed {seed}: {name}" for name in trace.run().wrong]
        steps = trace.engine.executor.steps
        for sample in (s for step in steps for part in step.requests for s in part.asked.samples):
            is_held, reasoning = sample.bitmask is not None, sample.params.reasoning
            self.num_held += is_held
            if reasoning is not None:
                self.num_held_after += is_held
                self.num_open += reasoning.is_open and not is_held
                self.num_begun += not reasoning.is_open and not is_held
        if (drafts := trace.engine.drafts) is not None:
            self.num_forced += drafts.num_forced
            self.num_guessed += drafts.num_held_guesses
        self.num_preempted += trace.result.num_preemptions
        self.num_complete += sum(
            outputs[-1].finish_reason == "stop" and not outputs[-1].new_token_ids
            for outputs in trace.engine.outputs.values()
        )


@pytest.fixture(scope="module", params=[False, True], ids=["one by one", "overlapped"])
def lives(request: pytest.FixtureRequest) -> Lives:
    total = Lives()
    for seed in range(NUM_TRACES):
        total.add(seed, OracleTrace(seed, async_scheduling=request.param))
    return total


def test_every_answer_that_is_held_to_a_grammar_is_the_lone_answer(lives: Lives) -> None:
    assert lives.wrong == []
    assert lives.num_held > 50 * NUM_TRACES
    assert lives.num_preempted > NUM_TRACES
    assert lives.num_complete > NUM_TRACES
    assert lives.num_forced > 5 * NUM_TRACES
    assert lives.num_guessed > NUM_TRACES / 2


def test_answers_begin_and_end_reasoning_before_a_grammar_holds_them(lives: Lives) -> None:
    assert min(lives.num_open, lives.num_begun, lives.num_held_after) > NUM_TRACES


def is_caught(make: Callable[[int], OracleTrace], num_traces: int = 40) -> bool:
    """Whether some trace gives a wrong answer, breaks an invariant, or ends the engine."""
    for seed in range(num_traces):
        try:
            if make(seed).run().wrong:
                return True
        except AssertionError:
            return True
    return False


class GivesTheMaskOfAnotherRequest(OracleGrammars):
    def _reply(self, request_id: str, answer: _ToyAnswer) -> MaskReply:
        return super()._reply(request_id, next(iter(self._answers.values())))


class GivesTheMaskOfTheStepBefore(OracleGrammars):
    def _reply(self, request_id: str, answer: _ToyAnswer) -> MaskReply:
        earlier = _ToyAnswer(answer.constraint, answer.token_ids[:-1])
        return super()._reply(request_id, earlier)


class LetsEveryAnswerEnd(OracleGrammars):
    """Does not mask end tokens."""

    def _allowed(self, answer: _ToyAnswer) -> list[int] | None:
        allowed = super()._allowed(answer)
        return allowed and sorted({*allowed, EOS})


@pytest.mark.parametrize(
    "mutant", [GivesTheMaskOfAnotherRequest, GivesTheMaskOfTheStepBefore, LetsEveryAnswerEnd]
)
def test_traces_catch_a_service_that(mutant: type[OracleGrammars]) -> None:
    assert is_caught(lambda seed: OracleTrace(seed, grammars_class=mutant))


@OVERLAPS
def test_traces_catch_a_request_that_keeps_its_mask_when_it_has_another_token(
    async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Request.append

    def append_alone(request: Request, token_id: int) -> None:
        mask = request.next_mask
        append(request, token_id)
        request.next_mask = mask

    monkeypatch.setattr(Request, "append", append_alone)
    assert is_caught(lambda seed: OracleTrace(seed, async_scheduling=async_scheduling))


def test_traces_catch_a_step_that_is_planned_before_the_grammar_knows_the_token_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ready = Request.num_ready_tokens.fget
    assert ready is not None

    def ready_without_grammars(request: Request) -> int:
        with monkeypatch.context() as patch:
            patch.setattr(Request, "has_grammar", False)
            return ready(request)

    monkeypatch.setattr(Request, "num_ready_tokens", property(ready_without_grammars))
    assert is_caught(lambda seed: OracleTrace(seed, async_scheduling=True))


def test_traces_catch_a_preempted_request_that_goes_on_without_its_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preempt = Scheduler._preempt

    def preempt_without_grammars(scheduler: Scheduler, victim: Request) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Request, "has_grammar", False)
            preempt(scheduler, victim)

    monkeypatch.setattr(Scheduler, "_preempt", preempt_without_grammars)
    assert is_caught(lambda seed: OracleTrace(seed))


@OVERLAPS
def test_traces_catch_reasoning_that_is_held_to_the_grammar(
    async_scheduling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Request, "bitmask", property(lambda request: request.next_mask or request.allowed)
    )
    assert is_caught(lambda seed: OracleTrace(seed, async_scheduling=async_scheduling))


def test_traces_catch_a_grammar_that_is_told_of_reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Request,
        "constrained_token_ids",
        lambda request, num_new: tuple(request.token_ids[-num_new:]),
    )
    assert is_caught(lambda seed: OracleTrace(seed))


def test_traces_catch_a_step_that_is_planned_before_it_is_known_that_reasoning_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ready = Request.num_ready_tokens.fget
    assert ready is not None

    def ready_while_it_reasons(request: Request) -> int:
        with monkeypatch.context() as patch:
            if request.grammar_start is None:
                patch.setattr(Request, "has_grammar", False)
            return ready(request)

    monkeypatch.setattr(Request, "num_ready_tokens", property(ready_while_it_reasons))
    assert is_caught(lambda seed: OracleTrace(seed, async_scheduling=True))


def test_traces_catch_rows_of_drafts_that_get_the_mask_of_another_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    behind = MaskedDrafts.bitmask_behind
    monkeypatch.setattr(
        MaskedDrafts, "bitmask_behind", lambda drafts, count: behind(drafts, max(1, count - 1))
    )
    assert is_caught(lambda seed: OracleTrace(seed))


class ForcesWhatTheMaskLeavesOpen(OracleGrammars):
    """Goes on with the first of several tokens as if it were the only one."""

    def _drafts(self, answer: _ToyAnswer) -> MaskedDrafts | None:
        drafts, allowed = super()._drafts(answer), self._allowed(answer)
        if drafts is not None or not allowed:
            return drafts
        behind = self._allowed(_ToyAnswer(answer.constraint, [*answer.token_ids, allowed[0]]))
        return MaskedDrafts((allowed[0],), (bitmask_of(behind, VOCAB_SIZE),)) if behind else None


class PermitsWhateverIsGuessed(OracleGrammars):
    """Follows a guess beyond what the grammar permits."""

    def _permits(self, token_id: int, allowed: Sequence[int]) -> bool:
        return token_id != EOS


class GoesOnByTheGuess(OracleGrammars):
    """Takes what was guessed for what the answer says."""

    def _drafts(self, answer: _ToyAnswer) -> MaskedDrafts | None:
        drafts = super()._drafts(answer)
        if drafts is not None and not drafts.begins_forced:
            answer.token_ids += drafts.token_ids[:1]
        return drafts


@pytest.mark.parametrize(
    "mutant", [ForcesWhatTheMaskLeavesOpen, PermitsWhateverIsGuessed, GoesOnByTheGuess]
)
def test_traces_catch_drafts_of_a_service_that(mutant: type[OracleGrammars]) -> None:
    assert is_caught(lambda seed: OracleTrace(seed, grammars_class=mutant))


def unmasked_guesses(request: Request, num_drafts: int) -> bytes | None:
    return None if num_drafts else request.bitmask


def test_traces_catch_guesses_whose_rows_have_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a token that the grammar forbids is drawn behind an accepted guess."""
    monkeypatch.setattr(chunk, "_bitmask_behind", unmasked_guesses)
    assert is_caught(lambda seed: OracleTrace(seed))


def test_traces_catch_a_guess_that_goes_on_behind_the_end_of_reasoning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafting, "_end_before_grammar", lambda request: None)
    assert is_caught(lambda seed: OracleTrace(seed))


def test_traces_catch_forced_tokens_behind_which_the_client_allows_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    leaves_any = grammars._leaves_any
    monkeypatch.setattr(
        grammars,
        "_leaves_any",
        lambda request, mask, drafts=(): bool(drafts) or leaves_any(request, mask),
    )
    with pytest.raises(ZeroDivisionError):  # the oracle draws one of no tokens
        is_caught(lambda seed: OracleTrace(seed))
