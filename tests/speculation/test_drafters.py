"""What drafters guess, and what they hold of past answers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lora_serve.config import SpeculativeConfig
from lora_serve.config.speculative import LOOKED_UP, METHODS
from lora_serve.identity import BASE_MODEL, EVERYTHING, AdapterRef, CacheNamespace, NoAdapter
from lora_serve.speculation import suffix
from lora_serve.speculation.base import Drafter, Origin, RequestDrafter
from lora_serve.speculation.methods import DRAFTERS, make_drafter
from lora_serve.speculation.past_answers import PastAnswers
from lora_serve.speculation.suffix import SuffixDrafter

RED, RED_2, BLUE = AdapterRef("red", b"1"), AdapterRef("red", b"2"), AdapterRef("blue", b"1")


def origin(
    adapter: AdapterRef | NoAdapter = BASE_MODEL, salt: str = "", tenant: str = ""
) -> Origin:
    return Origin(CacheNamespace(b"model", adapter, salt), tenant)


def drafts(drafter: RequestDrafter, token_ids: Sequence[int], most: int = 4) -> list[int]:
    drafter.take_in(token_ids, len(token_ids))
    return list(drafter.draft(most))


def drafter_of(method: str, **settings: object) -> Drafter:
    named = {f"speculative_{name}": value for name, value in settings.items()}
    drafter = make_drafter(SpeculativeConfig(speculative_method=method, **named))  # type: ignore[arg-type]
    assert drafter is not None
    return drafter


def test_every_method_that_may_be_asked_for_has_a_drafter() -> None:
    assert set(DRAFTERS) == set(METHODS)
    assert make_drafter(SpeculativeConfig()) is None


@pytest.mark.parametrize("method", LOOKED_UP)
def test_a_drafter_guesses_that_text_goes_on_as_it_did(method: str) -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5]
    request = drafter_of(method).begin(origin(), 5)
    assert drafts(request, text) == [6, 7, 8, 9]
    assert drafts(request, [*text, 6, 7, 8], most=2) == [9, 2]


@pytest.mark.parametrize("method", LOOKED_UP)
def test_a_drafter_guesses_nothing_of_what_never_stood_before(method: str) -> None:
    assert drafts(drafter_of(method).begin(origin(), 9), list(range(50))) == []


@pytest.mark.parametrize("method", LOOKED_UP)
def test_a_text_of_one_token_goes_on_with_it(method: str) -> None:
    assert drafts(drafter_of(method).begin(origin(), 9), [7] * 9) == [7] * 4


@pytest.mark.parametrize("method", LOOKED_UP)
def test_a_drafter_guesses_nothing_before_it_has_taken_in_all(method: str) -> None:
    request, text = drafter_of(method).begin(origin(), 9), [1, 2, 3, 1, 2, 3, 1, 2, 3]
    assert request.take_in(text, 5) == 5
    assert list(request.draft(4)) == []
    assert request.take_in(text, 5) == 4
    assert list(request.draft(2)) == [1, 2]


def test_requests_for_whose_tokens_there_is_no_room_are_drafted_for_once_others_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(suffix, "_MOST_TOKENS", 10)
    drafter, text = SuffixDrafter(100, 24, 1.0), [1, 2, 3, 1, 2, 3]
    first, second = (drafter.begin(origin(), 6) for _ in range(2))
    assert first.take_in(text, 9) == 6
    assert second.take_in(text, 9) == 4
    assert (drafts(first, text), drafts(second, text)) == ([1, 2, 3], [])
    assert first.take_in([*text, 1], 9) == 0
    assert list(first.draft(4)) == []
    del first
    drafter.work()
    assert drafts(second, text) == [1, 2, 3]


def test_ngrams_shorter_than_asked_for_are_not_looked_up() -> None:
    text = [1, 2, 3, 4, 9, 3, 4]
    drafter = drafter_of("ngram", prompt_lookup_min=3, prompt_lookup_max=3)
    assert drafts(drafter.begin(origin(), 9), text) == []
    assert drafts(drafter_of("ngram").begin(origin(), 9), text) == [9, 3, 4, 9]


def test_the_longest_end_says_how_many_tokens_are_drafted() -> None:
    text = [1, 2, 3, 4, 5, 6, 9, 2, 3]
    assert drafts(SuffixDrafter(100, 24, 1.0).begin(origin(), 9), text) == [4, 5]
    assert drafts(SuffixDrafter(100, 24, 2.0).begin(origin(), 9), text) == [4, 5, 6, 9]
    assert drafts(SuffixDrafter(100, 1, 1.0).begin(origin(), 9), text) == [4]


def learned(drafter: Drafter, asked: Origin, answer: Sequence[int]) -> None:
    drafter.learn(asked, answer)
    drafter.work()


def test_a_past_answer_is_offered_to_its_own_origin_alone() -> None:
    drafter = SuffixDrafter(1000, 24, 1.0)
    origins = [
        origin(),
        origin(tenant="x"),
        origin(salt="x"),
        origin(RED),
        origin(RED_2),
        origin(AdapterRef("red", b"1", generation=1)),
    ]
    for number, asked in enumerate(origins):
        learned(drafter, asked, [50, 51, 60 + number])
    for number, asked in enumerate(origins):
        assert drafts(drafter.begin(asked, 3), [9, 50, 51]) == [60 + number]
    assert drafts(drafter.begin(origin(BLUE), 3), [9, 50, 51]) == []


def test_a_request_finds_answers_that_end_while_it_runs() -> None:
    drafter = SuffixDrafter(1000, 24, 1.0)
    request = drafter.begin(origin(), 2)
    assert drafts(request, [9, 50]) == []
    learned(drafter, origin(), [50, 51, 52, 53])
    assert drafts(request, [9, 50, 51]) == [52, 53]
    learned(drafter, origin(), [70, 71, 72])
    assert drafts(request, [9, 50, 51, 70, 71]) == [72]


def test_answers_go_with_their_version() -> None:
    past = PastAnswers(10_000)
    for asked in (origin(RED), origin(RED_2), origin(BLUE), origin()):
        past.add(asked, [1, 2, 3])
        past.work()
    past.add(origin(RED), [7, 8])  # waits
    past.forget("red", RED_2)
    past.work()
    assert not past.of(origin(RED))
    assert all(past.of(asked) for asked in (origin(RED_2), origin(BLUE), origin()))
    past.forget("red")
    assert not past.of(origin(RED_2))
    past.forget(EVERYTHING)
    assert (len(past), past.num_tokens) == (0, 0)


@pytest.mark.parametrize("length", [240, 990])
@pytest.mark.parametrize("max_tokens", [100, 1000])
def test_past_answers_of_one_origin_are_bounded_within_an_answer_too(
    length: int, max_tokens: int
) -> None:
    past = PastAnswers(max_tokens)
    answers = min(length, max_tokens)
    for first in range(60):
        past.add(origin(), range(first, first + answers))
        for _ in range(4):
            past.work()
            automata = past.of(origin())
            assert past.num_tokens == sum(len(each) + 64 for each in automata) <= max_tokens
    assert automata[0].token_ids[-1] == first + answers - 1


def test_past_answers_are_bounded() -> None:
    past = PastAnswers(1000)
    for number in range(2000):
        past.add(origin(salt=str(number % 40)), [number] * (1 + number % 90))
        past.work()
        assert 0 <= past.num_tokens <= 1000
    assert past.of(origin(salt="39"))
    assert not past.of(origin(salt="5"))


def test_a_long_answer_is_taken_in_over_several_steps() -> None:
    past = PastAnswers(10_000)
    past.add(origin(), range(1000))
    past.work()
    (automaton,) = past.of(origin())
    assert len(automaton) < 300
    for _ in range(3):
        past.work()
    assert len(automaton) == 1000


def test_of_one_origin_the_newest_answers_stay() -> None:
    past = PastAnswers(4000)
    for number in range(100):
        past.add(origin(), range(200 * number, 200 * number + 200))
        past.work()
    newest, older = past.of(origin())
    assert past.num_tokens < 4000
    assert newest.token_ids[-1] == 200 * 100 - 1
    assert len(older) >= 1000
