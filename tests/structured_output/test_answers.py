"""Tokens that are looked for ahead of an answer change nothing of what may follow it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from lora_serve.bitmask import bitmask_of, bitmask_of_one
from lora_serve.errors import InvalidRequestError
from lora_serve.structured_output.answers import Answers, GrammarCache
from lora_serve.structured_output.backend import load_backend
from lora_serve.structured_output.service import MaskReply
from lora_serve.structured_output.wire import Open
from lora_serve.structured_outputs import Guess, StructuredOutput
from lora_serve.text.tokenizer import Tokenizer
from tests.structured_output.conftest import require_xgrammar, vocabulary_of

PERSON = {
    "type": "object",
    "required": ["author", "year"],
    "properties": {"author": {"type": "string", "maxLength": 5}, "year": {"type": "integer"}},
}
CONSTRAINTS = (
    StructuredOutput.of(json=PERSON),
    StructuredOutput.of(regex="The answer is: [0-9]{2}, I think\\."),
    StructuredOutput.of(choice=("positive", "negative")),
)
END = 0
CONSTRAINT = StructuredOutput("regex", "a fake one")


def allowed(mask: bytes | None) -> list[int]:
    number = int.from_bytes(mask or b"", "little")
    return [token_id for token_id in range(number.bit_length()) if number >> token_id & 1]


@pytest.mark.parametrize("library", ["llguidance", "xgrammar"])
def test_masks_are_the_same_whatever_is_looked_at_ahead_of_an_answer(
    tokenizer: Tokenizer, library: str
) -> None:
    if library == "xgrammar":
        require_xgrammar()
    eos = tokenizer.eos_token_ids
    backend = load_backend(library, vocabulary_of(tokenizer))
    """Forced tokens, and guesses: right ones, wrong from some token on, or forbidden there."""
    num_forced = num_permitted = 0
    for seed, constraint in enumerate(CONSTRAINTS * 2):
        rng, allows_eos = random.Random(seed), seed < len(CONSTRAINTS)
        grammar = backend.compile(constraint)
        plain, ahead = (Answers(GrammarCache(1, 1), tokenizer.vocab_size, eos, n) for n in (0, 5))
        one = plain.begin("one", constraint, grammar, allows_eos=allows_eos)
        two = ahead.begin("one", constraint, grammar, allows_eos=allows_eos)
        for _ in range(30):
            assert (allowed(one.bitmask), one.is_finished) == (
                allowed(two.bitmask),
                two.is_finished,
            )
            token_ids = drawn(two, rng, eos)
            if not token_ids:
                break
            num_forced += len(token_ids) - 1
            for token_id in token_ids:
                assert token_id in allowed(one.bitmask)
                one = plain.advance("one", (token_id,))
            two = ahead.advance("one", token_ids)
            guess = guessed(ahead, two, rng, tokenizer.vocab_size)
            if (followed := ahead.follow(two, guess)) is not None:
                while followed.go_on():
                    pass
                two = followed.followed()
                num_permitted += (
                    two.drafts.num_guesses(len(two.drafts.token_ids)) if two.drafts else 0
                )
    assert num_forced > 20
    assert num_permitted > 20


def guessed(answers: Answers, reply: MaskReply, rng: random.Random, vocab_size: int) -> Guess:
    """A guess behind a reply, each of whose tokens is permitted, but for the last one mostly."""
    fork, token_ids = answers._answers["one"].matcher.fork(), list[int]()
    if reply.drafts is not None:
        token_ids += reply.drafts.token_ids
    for _ in range(rng.randrange(4)):
        if fork.is_finished or not (choices := allowed(fork.bitmask())):
            break
        token_ids.append(rng.choice(choices))
        fork.accept(token_ids[-1])
    return Guess((*token_ids, rng.randrange(vocab_size)), rng.randrange(4))


def drawn(reply: MaskReply, rng: random.Random, eos: Sequence[int]) -> tuple[int, ...]:
    """Some of the drafts, and one behind them; nothing where the answer ends."""
    if reply.bitmask is None:
        return ()
    forced = reply.drafts.token_ids if reply.drafts else ()
    count = rng.randrange(len(forced) + 1)
    mask = reply.drafts.bitmask_behind(count) if reply.drafts and count else reply.bitmask
    choices = [token_id for token_id in allowed(mask) if token_id not in eos]
    return (*forced[:count], rng.choice(choices)) if choices else ()


class Script:
    """A matcher that allows these tokens, each place its own; an empty place cannot be computed."""

    def __init__(self, places: Sequence[Sequence[int]]) -> None:
        self.places = list(places)

    def matcher(self) -> Script:
        return self

    @property
    def is_finished(self) -> bool:
        return not self.places

    def bitmask(self) -> bytes:
        if not self.places[0]:
            raise InvalidRequestError("too complex", "structured_outputs")
        return bitmask_of(self.places[0], 16)

    def accept(self, token_id: int) -> None:
        assert token_id in self.places.pop(0)

    def fork(self) -> Script:
        return Script(self.places)


def begun(*places: Sequence[int], is_alone: bool = False) -> tuple[Answers, MaskReply]:
    answers = Answers(GrammarCache(1, 1), 16, (END,), max_drafts=3)
    reply = answers.begin("one", CONSTRAINT, Script(places), is_alone=is_alone)
    assert isinstance(reply, MaskReply)
    return answers, reply


@pytest.mark.parametrize(
    ("places", "forced", "behind"),
    [
        (((4,), (5, 6)), (4,), (5, 6)),
        (((4,), (5,), (END,)), (4, 5), (END,)),
        (((4,), (5,)), (4,), (5,)),  # nothing may follow, so the last one ends the answer
        (((4,), (5,), ()), (4,), (5,)),
        (((4,), (5,), (6,), (7,), (8,)), (4, 5, 6), (7,)),
    ],
)
def test_forced_tokens_are_those_behind_which_a_token_may_be_drawn(
    places: tuple[tuple[int, ...], ...], forced: tuple[int, ...], behind: tuple[int, ...]
) -> None:
    _, reply = begun(*places)
    assert allowed(reply.bitmask) == [forced[0]]
    assert reply.drafts is not None
    assert reply.drafts.token_ids == forced
    assert allowed(reply.drafts.bitmasks[-1]) == list(behind)


@pytest.mark.parametrize("places", [((END,), (4,)), ((4, 5), (6,)), ((4,),), ((4,), ())])
def test_an_end_token_one_of_several_and_the_last_one_are_not_forced(
    places: tuple[tuple[int, ...], ...],
) -> None:
    _, reply = begun(*places)
    assert allowed(reply.bitmask) == list(places[0])
    assert reply.drafts is None


def test_what_cannot_be_computed_ahead_fails_when_the_answer_comes_there() -> None:
    answers, _ = begun((4,), (5,), (), is_alone=True)
    reply = answers.advance("one", (4,))
    assert (reply.bitmask, reply.drafts, reply.error) == (bitmask_of_one(5), None, "")
    assert answers.advance("one", (5,)).error == "too complex"


def test_a_token_that_is_not_the_forced_one_is_refused() -> None:
    answers, _ = begun((4,), (5, 6), is_alone=True)
    assert "does not allow token 5" in answers.advance("one", (5,)).error


def test_an_answer_that_fails_at_what_others_have_used_begins_again() -> None:
    answers, reply = begun((4, 5), (6, 7), (), is_alone=False)
    assert answers.follow(reply, Guess((4,), 1)) is not None
    assert answers.advance("one", (4,)).error == ""
    again = answers.advance("one", (6,))
    assert again == Open("one", CONSTRAINT, allows_eos=True, token_ids=(4, 6))


def test_no_guess_uses_a_grammar_that_an_answer_has_alone() -> None:
    answers, reply = begun((4, 5), (6, 7), is_alone=True)
    assert answers.follow(reply, Guess((4,), 1)) is None


@pytest.mark.parametrize(
    ("places", "guess", "drafts", "num_guesses"),
    [
        (((4, 5), (6, 7), (8, 9)), Guess((4, 6), 2), (4, 6), 2),
        (((4, 5), (6, 7), (8, 9)), Guess((4, 6), 1), (4,), 1),  # no more is asked for
        (((4, 5), (6, 7), (8, 9)), Guess((4, 9), 2), (4,), 1),  # forbidden
        (((4, 5), (6,), (7, 8)), Guess((4,), 1), (4, 6), 1),  # forced behind a guess
        (((4, 5), (6,), (7, 8)), Guess((4, 9, 7), 2), (4, 6), 1),  # the forced one is another
        (((3,), (4, 5), (6, 7)), Guess((3, 4), 1), (3, 4), 1),  # a guess behind a forced token
        (((3,), (4, 5), (6, 7)), Guess((9, 4), 1), (3,), 0),
        (((4, 5), (6,)), Guess((4, 6), 2), (4,), 1),  # nothing may follow the forced one
        (((4, 5), (6,), ()), Guess((4, 6), 2), (4,), 1),
        (((4, 5),), Guess((4,), 1), (), 0),  # nothing may follow it
        (((4, 5), ()), Guess((4,), 1), (), 0),  # what may follow cannot be computed
        (((4, END), (5, 6)), Guess((END,), 1), (), 0),
    ],
)
def test_a_guess_is_cut_where_the_grammar_forbids_it(
    places: tuple[tuple[int, ...], ...], guess: Guess, drafts: tuple[int, ...], num_guesses: int
) -> None:
    answers, reply = begun(*places)
    followed = answers.follow(reply, guess)
    assert followed is not None
    while followed.go_on():
        pass
    found = followed.followed().drafts
    assert (() if found is None else found.token_ids) == drafts
    if found is not None:
        assert found.num_guesses(len(drafts)) == num_guesses
        masks = [found.bitmask_behind(count) for count in range(1, len(drafts) + 1)]
        assert [allowed(mask) for mask in masks] == [[*place] for place in places[1:]][: len(masks)]
    as_it_was = answers.advance("one", (places[0][0],))
    assert isinstance(as_it_was, Open) == (places[1:] == ((),))
