from __future__ import annotations

from pathlib import Path

from benchmarks.soak.cold_answers import ColdAnswers
from benchmarks.soak.journal import (
    ABSENT,
    ANSWERED,
    DOWN,
    LEFT,
    QUEUE_FULL,
    UNEXPECTED,
    UNREADABLE,
    WRONG,
    Journal,
)
from benchmarks.soak.questions import Question
from benchmarks.soak.tenants import Span, Tenant
from lora_serve.fuzz.answers import Heard

QUESTION = Question(0, "/v1/completions", {"n": 1})
RED, BLUE = "aaaaaaaaaaaa", "bbbbbbbbbbbb"


def answer(token_ids: list[int], version: str = "", *, logprob: float = -0.5) -> dict[str, object]:
    """An answer's JSON. version: whose digest its fingerprint has."""
    fingerprint = f"feed-{version}-g0" if version else "feed"
    logprobs = {
        "tokens": ["x"] * len(token_ids),
        "token_logprobs": [logprob] * len(token_ids),
        "top_logprobs": [{"x": logprob}] * len(token_ids),
    }
    choice = {"index": 0, "text": "x" * len(token_ids), "token_ids": token_ids,
              "logprobs": logprobs, "finish_reason": "length", "stop_reason": None}  # fmt: skip
    return {"system_fingerprint": fingerprint, "choices": [choice]}


def heard(
    document: dict[str, object], *, begin: float = 10.0, end: float = 11.0, status: int = 200
) -> Heard:
    one = Heard(begin=begin, end=end, status=status)
    one.add(document)
    return one


def error(status: int, message: str, *, begin: float = 10.0, end: float = 11.0) -> Heard:
    document: dict[str, object] = {"error": {"code": status, "message": message}}
    return heard(document, begin=begin, end=end, status=status)


def journal() -> Journal:
    """The base model says 1, 2, 3, the red version 4, 5, the blue one 6."""
    answers = ColdAnswers()
    for version, token_ids in (("", [1, 2, 3]), (RED, [4, 5]), (BLUE, [6])):
        answers.put(QUESTION, version, heard(answer(token_ids, version)))
    return Journal(answers)


def tenant(*versions: Span) -> Tenant:
    return Tenant("tenant", Path("/adapters/tenant"), list(versions))


def kind_of(one: Heard, of: Tenant | None = None, *outages: Span) -> str:
    notes = journal()
    notes.outages.extend(outages)
    notes.note_answer(QUESTION, of, one)
    (kind,) = notes.counts
    return kind


def test_an_answer_is_right_if_it_is_the_cold_one_to_the_bit() -> None:
    assert kind_of(heard(answer([1, 2, 3]))) == ANSWERED
    assert kind_of(heard(answer([1, 2, 4]))) == WRONG
    assert kind_of(heard(answer([1, 2, 3], logprob=-0.5000001))) == WRONG
    assert kind_of(heard(answer([1, 2]))) == WRONG


def test_the_start_of_an_answer_is_right_if_the_cold_one_begins_so() -> None:
    for token_ids, kind in (([1, 2], LEFT), ([1, 3], WRONG)):
        one = heard(answer(token_ids))
        one.has_left = True
        assert kind_of(one) == kind


def test_the_version_that_answers_must_have_been_there() -> None:
    red_then_blue = tenant(Span(RED, 0.0, 10.5), Span(BLUE, 10.4))
    assert kind_of(heard(answer([4, 5], RED)), red_then_blue) == ANSWERED
    assert kind_of(heard(answer([6], BLUE)), red_then_blue) == ANSWERED
    late = heard(answer([4, 5], RED), begin=10.6, end=11.0)
    assert kind_of(late, red_then_blue) == WRONG
    early = heard(answer([6], BLUE), begin=9.0, end=10.0)
    assert kind_of(early, red_then_blue) == WRONG
    assert kind_of(heard(answer([4, 5], RED))) == WRONG  # asked of the base model


def test_the_claimed_version_must_answer_as_it_does_alone() -> None:
    assert kind_of(heard(answer([6], RED)), tenant(Span(RED, 0.0))) == WRONG


def test_errors_are_excused_only_by_what_happened_then() -> None:
    outage, other = Span("engine", 10.5, 12.0), Span("engine", 20.0, 30.0)
    assert kind_of(error(503, "the engine has died"), None, outage) == DOWN
    assert kind_of(error(503, "the engine has died"), None, other) == UNEXPECTED
    assert kind_of(error(503, "limit of 48 (--max-num-queued-reqs)")) == QUEUE_FULL
    assert kind_of(error(500, "bug"), None, outage) == UNEXPECTED
    gone, there = tenant(), tenant()
    gone.absent.append(Span("", 10.9))
    assert kind_of(error(404, "no such model"), gone) == ABSENT
    assert kind_of(error(404, "no such model"), there) == UNEXPECTED
    gone.unreadable.append(Span("", 5.0, 10.1))
    assert kind_of(error(400, "its files have changed"), gone) == UNREADABLE
    assert kind_of(error(400, "its files have changed"), there) == UNEXPECTED


def test_what_came_before_an_error_is_compared_too() -> None:
    outage = Span("engine", 10.5, 12.0)
    for token_ids, kind in (([1, 2], DOWN), ([2], WRONG)):
        one = heard(answer(token_ids))
        one.add({"error": {"code": 503, "message": "the engine has died"}})
        assert kind_of(one, None, outage) == kind
