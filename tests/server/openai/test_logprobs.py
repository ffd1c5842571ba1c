from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from lora_serve.server.http.json_response import encode
from lora_serve.server.openai.logprobs import (
    LOWEST,
    CompletionLogprobsWriter,
    chat_logprobs,
    clamp,
    prompt_logprobs,
)
from lora_serve.step import TokenLogprobs
from tests.fakes.tokenizer import TURN, ByteTokenizer

TOKENIZER = ByteTokenizer()


def position(token_id: int, logprob: float = -1.0, top: tuple = ()) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprob, rank=3, top=top)


def test_what_json_cannot_write_is_clamped() -> None:
    assert [clamp(value) for value in (-math.inf, math.nan, -1e30)] == [LOWEST] * 3
    written = CompletionLogprobsWriter(TOKENIZER).write([position(97, -math.inf)])
    assert b"-9999.0" in encode(written)


@given(st.floats(max_value=0.0, min_value=LOWEST, exclude_min=True))
def test_every_other_value_is_kept_to_the_bit(value: float) -> None:
    assert math.copysign(1, clamp(value)) == math.copysign(1, value)
    assert clamp(value) == value


@given(st.text(max_size=20))
def test_an_offset_counts_the_whole_characters_before_a_token(text: str) -> None:
    token_ids = list(text.encode())
    written = CompletionLogprobsWriter(TOKENIZER).write([position(t) for t in token_ids])
    expected = [
        len(text.encode()[:index].decode("utf-8", "ignore")) for index in range(len(token_ids))
    ]
    assert written.text_offset == expected


@given(st.text(max_size=20), st.integers(0, 20))
def test_offsets_go_on_from_piece_to_piece(text: str, cut: int) -> None:
    positions = [position(token_id) for token_id in text.encode()]
    whole = CompletionLogprobsWriter(TOKENIZER).write(positions)
    writer = CompletionLogprobsWriter(TOKENIZER)
    first, second = writer.write(positions[:cut]), writer.write(positions[cut:])
    assert first.text_offset + second.text_offset == whole.text_offset


def test_a_token_that_is_not_shown_takes_no_room() -> None:
    positions = [position(token_id) for token_id in (97, TURN, 98)]
    written = CompletionLogprobsWriter(TOKENIZER).write(positions)
    assert written.text_offset == [0, 1, 1]
    shown = CompletionLogprobsWriter(TOKENIZER, skip_special_tokens=False).write(positions)
    assert shown.text_offset == [0, 1, 1 + len("<turn>")]


@given(st.text(max_size=9), st.text(max_size=9), st.booleans())
def test_the_answers_offsets_begin_where_the_echoed_prompt_ends(
    prompt: str, answer: str, adds_special: bool
) -> None:
    first, *others = [*TOKENIZER.encode(prompt, adds_special), *b"?"]
    writer = CompletionLogprobsWriter(TOKENIZER)
    scored = [position(token_id) for token_id in others]
    echo = writer.write_prompt([first, *others], scored, f"{prompt}?")
    written = writer.write([position(token_id) for token_id in answer.encode()])
    offsets = echo.text_offset[adds_special:] + written.text_offset
    text = f"{prompt}?{answer}".encode()
    assert offsets == [len(text[:index].decode("utf-8", "ignore")) for index in range(len(text))]
    assert echo.text_offset[0] == 0
    assert echo.token_logprobs[0] is None
    assert echo.top_logprobs[0] is None


def test_the_token_itself_is_always_among_the_top() -> None:
    written = CompletionLogprobsWriter(TOKENIZER).write(
        [position(99, -3.0, ((97, -0.5), (98, -1.0))), position(97, -0.5, ((97, -0.5),))]
    )
    assert written.top_logprobs == [{"a": -0.5, "b": -1.0, "c": -3.0}, {"a": -0.5}]


def test_the_token_itself_comes_first_whatever_its_rank() -> None:
    unlikely = position(97, -5.0, ((98, -0.1), (97, -5.0)))
    (top,) = CompletionLogprobsWriter(TOKENIZER).write([unlikely]).top_logprobs
    assert list(top or ()) == ["a", "b"]


def test_of_tokens_that_look_alike_the_most_likely_is_shown() -> None:
    halves = ((0xC3, -0.5), (0xA9, -2.0))  # two halves of characters: both are U+FFFD
    written = CompletionLogprobsWriter(TOKENIZER).write([position(0xA9, -2.0, halves)])
    assert written.top_logprobs == [{"\ufffd": -0.5}]


def test_chat_shows_the_bytes_of_half_a_character() -> None:
    (entry,) = chat_logprobs(TOKENIZER, [position(0xC3, -1.5, ((0xC3, -1.5),))]).content
    assert (entry.token, entry.bytes) == ("\ufffd", [0xC3])
    assert entry.top_logprobs[0].bytes == [0xC3]


def test_among_listed_tokens_a_chat_tells_the_drawn_one_once() -> None:
    for top, told in (
        (((98, -2.0),), [(97, -1.0), (98, -2.0)]),
        (((98, -2.0), (97, -1.0)), [(98, -2.0), (97, -1.0)]),
    ):
        (entry,) = chat_logprobs(TOKENIZER, [position(97, -1.0, top)], tells_drawn=True).content
        assert [(one.bytes, one.logprob) for one in entry.top_logprobs] == [
            ([token_id], logprob) for token_id, logprob in told
        ]


def test_ranks_of_prompt_tokens_are_kept() -> None:
    first, second = prompt_logprobs(TOKENIZER, 2, [position(99, -3.0, ((97, -0.5), (98, -1.0)))])
    assert first is None
    assert second is not None
    assert {token_id: entry.rank for token_id, entry in second.items()} == {97: 1, 98: 2, 99: 3}
