from __future__ import annotations

import random

from lora_serve.fuzz.oracle.content import bad_ends
from lora_serve.fuzz.oracle.engine import OracleEngine
from lora_serve.fuzz.oracle.lone_answers import lone_answer
from lora_serve.messages import TokenRules
from lora_serve.scheduler.bad_words import BadWords

PROMPT = [10 + i % 400 for i in range(40)]


def test_a_word_of_one_token_is_always_forbidden() -> None:
    words = BadWords([(5,), (3,), (5,)])
    assert not words.has_sequences
    assert list(words.banned_after(())) == list(words.banned_after([5, 3])) == [3, 5]


def test_the_last_token_of_a_word_is_forbidden_behind_the_others() -> None:
    words = BadWords([(1, 2, 3), (2, 4), (9,)])
    assert words.has_sequences
    assert list(words.banned_after([2])) == [9, 4]
    assert list(words.banned_after([1, 2])) == [9, 3, 4]
    assert list(words.banned_after([1, 2, 2])) == [9, 4]
    assert list(words.banned_after([2, 1])) == [9]


def test_words_are_found_as_by_comparing_each_of_them() -> None:
    rng = random.Random(1)
    for _ in range(300):
        given = [tuple(rng.choices(range(4), k=rng.randrange(1, 5))) for _ in range(6)]
        words, answer = BadWords(given), rng.choices(range(4), k=rng.randrange(8))
        tail = answer[max(0, len(answer) + 1 - words.longest) :]
        assert set(words.banned_after(tail)) == bad_ends(given, answer)


def test_a_prompt_that_ends_in_half_a_bad_word_forbids_nothing() -> None:
    first, second = lone_answer(PROMPT, b"", 2)
    engine = OracleEngine()
    engine.add("prompt", PROMPT, max_tokens=1, rules=TokenRules(bad_words=((PROMPT[-1], first),)))
    engine.add("answer", PROMPT, max_tokens=2, rules=TokenRules(bad_words=((first, second),)))
    engine.run()
    assert engine.tokens("prompt") == [first]
    assert engine.tokens("answer")[0] == first
    assert engine.tokens("answer")[1] != second
