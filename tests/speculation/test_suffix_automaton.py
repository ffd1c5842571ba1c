from __future__ import annotations

import random

import pytest

from lora_serve.speculation.suffix_automaton import TEXT_END, Match, SuffixAutomaton


def automaton_of(*texts: list[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.begin_text()
        for token_id in text:
            automaton.append(token_id)
    return automaton


def longest_repeat(text: list[int]) -> int:
    """The length of the longest end of a text that stands before its end, too."""
    for length in range(len(text) - 1, 0, -1):
        end = text[-length:]
        if any(text[i : i + length] == end for i in range(len(text) - length)):
            return length
    return 0


def longest_match(texts: list[list[int]], asked: list[int]) -> int:
    """The length of the longest end of `asked` that stands in one of the texts."""
    for length in range(len(asked), 0, -1):
        end = asked[-length:]
        if any(text[i : i + length] == end for text in texts for i in range(len(text))):
            return length
    return 0


@pytest.mark.parametrize("num_kinds", [1, 2, 4, 30])
def test_the_longest_repeat_is_what_a_search_of_the_whole_text_finds(num_kinds: int) -> None:
    rng = random.Random(num_kinds)
    automaton, text = SuffixAutomaton(), list[int]()
    for _ in range(120):
        text.append(rng.randrange(num_kinds))
        automaton.append(text[-1])
        length, end = automaton.longest_repeat()
        assert length == longest_repeat(text)
        if length:
            assert end < len(text)
            assert text[end - length : end] == text[-length:]


@pytest.mark.parametrize("num_kinds", [2, 5, 40])
def test_a_match_is_the_longest_that_stands_in_any_text_while_both_grow(num_kinds: int) -> None:
    rng = random.Random(num_kinds)
    texts, asked = [[rng.randrange(num_kinds)]], list[int]()
    automaton = automaton_of(texts[0])
    match = Match(automaton)
    for _ in range(200):
        if rng.random() < 0.5:
            if rng.random() < 0.1:
                texts.append([])
                automaton.begin_text()
            texts[-1].append(rng.randrange(num_kinds))
            automaton.append(texts[-1][-1])
        else:
            asked.append(rng.randrange(num_kinds))
            match.append(asked[-1])
            if rng.random() < 0.5:  # a longer one may have come since, and need not be found
                match = Match(automaton)
                for token_id in asked:
                    match.append(token_id)
                assert match.length == longest_match(texts, asked)
        length = match.length
        assert any(
            text[i : i + length] == asked[len(asked) - length :]
            for text in texts
            for i in range(len(text) + 1)
        )


def test_what_follows_a_match_comes_from_one_text() -> None:
    automaton = automaton_of([1, 2, 3], [4, 2, 9, 8])
    match = Match(automaton)
    for token_id in (7, 4, 2):
        match.append(token_id)
    assert match.following(10) == [9, 8]
    match.append(9)
    match.append(8)
    assert match.following(10) == []  # it is the end of a text


def test_a_match_that_ends_a_text_gives_way_to_a_shorter_one_that_goes_on() -> None:
    automaton = automaton_of([5, 1, 2], [1, 2, 6])
    match = Match(automaton)
    for token_id in (5, 1, 2):
        match.append(token_id)
    assert match.following(4) == [6]
    assert match.length == 2


def test_the_last_place_of_a_repeat_is_preferred() -> None:
    automaton = automaton_of([1, 2, 3, 1, 2, 4, 1, 2])
    length, end = automaton.longest_repeat()
    assert (length, list(automaton.token_ids[end : end + 1])) == (2, [4])


def test_texts_stay_apart() -> None:
    automaton = automaton_of([1], [2])
    assert list(automaton.token_ids) == [1, TEXT_END, 2]
    match = Match(automaton)
    match.append(1)
    assert match.following(3) == []


def fibonacci_word(length: int) -> list[int]:
    word, longer = [0], [0, 1]
    while len(longer) < length:
        word, longer = longer, longer + word
    return longer[:length]


LONG = 4096
COSTLY = {
    "one token, then another": [1] * (LONG - 1) + [2],
    "runs of one token, ever longer": [t for n in range(1, 90) for t in (*[1] * n, 2)],
    "as many of one as of the other": [1] * (LONG // 2) + [2] * (LONG // 2),
    "repeats of repeats": fibonacci_word(LONG),
    "one token that all others follow": [t for n in range(LONG // 2) for t in (0, n + 1)],
    "a long end that is split ever shorter": [
        *(t for n in range(40) for t in (*range(1, 41), 100 + n)),
        *(t for n in range(1, 41) for t in (200 + n, *range(n, 41))),
    ],
    "two tokens by chance": random.Random(1).choices((1, 2), k=LONG),
}


@pytest.mark.parametrize("text", COSTLY.values(), ids=COSTLY)
def test_no_text_costs_more_than_so_many_looks_a_token(
    text: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither to hold nor to find ends in: who sends a prompt chooses what it repeats."""
    num_looks, follow = 0, SuffixAutomaton.follow

    def counted(automaton: SuffixAutomaton, state: int, token_id: int) -> int | None:
        nonlocal num_looks
        num_looks += 1
        return follow(automaton, state, token_id)

    monkeypatch.setattr(SuffixAutomaton, "follow", counted)
    automaton = automaton_of(text)
    assert num_looks < 8 * len(text), "not more the longer it is"
    assert len(automaton.lengths) <= 2 * len(text)
    assert len(text) + sum(map(len, automaton._more.values())) < 4 * len(text)
    num_looks, match = 0, Match(automaton)
    for token_id in [*reversed(text), *text]:
        match.append(token_id)
    assert num_looks <= 2 * 2 * len(text)
