"""Tokens that are looked for ahead of an answer change nothing of what may follow it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from lora_serve.errors import InvalidRequestError
from lora_serve.structured_output.answers import Answers, GrammarCache
from lora_serve.structured_output.backend import Vocabulary, bitmask_of, load_backend
from lora_serve.structured_output.service import MaskReply
from lora_serve.structured_outputs import StructuredOutput, bitmask_of_one
from lora_serve.text.tokenizer import Tokenizer
from tests.structured_output.conftest import require_xgrammar

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
def test_masks_are_the_same_whether_or_not_forced_tokens_are_looked_for(
    tokenizer: Tokenizer, library: str
) -> None:
    if library == "xgrammar":
        require_xgrammar()
    eos = tokenizer.eos_token_ids
    backend = load_backend(
        library,
        Vocabulary(
            tokenizer.to_json(),
            tokenizer.vocab_size,
            eos,
            tokenizer.token_bytes,
            tokenizer.special_token_ids,
        ),
    )
    num_forced = 0
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
    assert num_forced > 20


def drawn(reply: MaskReply, rng: random.Random, eos: Sequence[int]) -> tuple[int, ...]:
    """Some of the forced tokens, and one behind them; nothing where the answer ends."""
    if reply.bitmask is None:
        return ()
    forced = reply.forced.token_ids if reply.forced else ()
    count = rng.randrange(len(forced) + 1)
    mask = reply.forced.bitmask_behind(count) if reply.forced and count else reply.bitmask
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


def begun(*places: Sequence[int]) -> tuple[Answers, MaskReply]:
    answers = Answers(GrammarCache(1, 1), 16, (END,), max_forced_tokens=3)
    return answers, answers.begin("one", CONSTRAINT, Script(places))


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
    assert reply.forced is not None
    assert reply.forced.token_ids == forced
    assert allowed(reply.forced.bitmask) == list(behind)


@pytest.mark.parametrize("places", [((END,), (4,)), ((4, 5), (6,)), ((4,),), ((4,), ())])
def test_an_end_token_one_of_several_and_the_last_one_are_not_forced(
    places: tuple[tuple[int, ...], ...],
) -> None:
    _, reply = begun(*places)
    assert allowed(reply.bitmask) == list(places[0])
    assert reply.forced is None


def test_what_cannot_be_computed_ahead_fails_when_the_answer_comes_there() -> None:
    answers, _ = begun((4,), (5,), ())
    reply = answers.advance("one", (4,))
    assert (reply.bitmask, reply.forced, reply.error) == (bitmask_of_one(5), None, "")
    assert answers.advance("one", (5,)).error == "too complex"


def test_a_token_that_is_not_the_forced_one_is_refused() -> None:
    answers, _ = begun((4,), (5, 6))
    assert "does not allow token 5" in answers.advance("one", (5,)).error
