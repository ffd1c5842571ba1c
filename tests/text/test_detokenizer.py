from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_serve.text.detokenizer import IncrementalDetokenizer
from lora_serve.text.tokenizer import Tokenizer

TEXTS = st.text(st.sampled_from("hello wrd.,\n\t 你好世界😀🤖éΩп\u200d\u0301"), max_size=40)
NUM_IDS = 440  # a few more than the byte-level vocabulary has


class MeteredTokenizer(Tokenizer):
    """Remembers the longest list of tokens that it had to decode."""

    longest = 0

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.longest = max(self.longest, len(token_ids))
        return super().decode(token_ids, skip_special_tokens)


def deltas(detokenizer: IncrementalDetokenizer, token_ids: Sequence[int]) -> list[str]:
    shown = [detokenizer.append([token_id], finished=False) for token_id in token_ids]
    return [*shown, detokenizer.append([], finished=True)]


@settings(max_examples=300, deadline=None)
@given(
    token_ids=st.lists(st.integers(0, NUM_IDS), max_size=60),
    sizes=st.lists(st.integers(1, 4), min_size=60, max_size=60),
    skip=st.booleans(),
)
def test_deltas_of_any_tokens_in_any_pieces_are_the_whole_text(
    byte_level: Tokenizer, token_ids: list[int], sizes: list[int], skip: bool
) -> None:
    detokenizer = IncrementalDetokenizer(byte_level, skip_special_tokens=skip)
    shown, rest = "", list(token_ids)
    for size in sizes:
        piece, rest = rest[:size], rest[size:]
        shown += detokenizer.append(piece, finished=not rest)
        if not rest:
            break
    assert shown == byte_level.decode(token_ids, skip_special_tokens=skip)


def test_special_tokens_that_are_wanted_are_shown_and_the_others_are_not(
    byte_level: Tokenizer,
) -> None:
    start, end = map(byte_level.special_token_id, ("<|start|>", "<|end|>"))
    assert start is not None
    assert end is not None
    assert byte_level.special_token_id("hello") is None
    token_ids = [start, *byte_level.encode("hello"), end]
    shown = deltas(IncrementalDetokenizer(byte_level, shown_special_tokens=[start]), token_ids)
    assert "".join(shown) == "<|start|>hello"


@settings(max_examples=100, deadline=None)
@given(token_ids=st.lists(st.sampled_from(range(100, 260)), min_size=100, max_size=200))
def test_deltas_of_endless_garbage_are_the_whole_text(
    byte_level: Tokenizer, token_ids: list[int]
) -> None:
    shown = deltas(IncrementalDetokenizer(byte_level), token_ids)
    assert "".join(shown) == byte_level.decode(token_ids)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_no_part_of_a_character_is_ever_shown(
    byte_level: Tokenizer, sentence_piece: Tokenizer, text: str
) -> None:
    for tokenizer in (byte_level, sentence_piece):
        token_ids = tokenizer.encode(text)
        shown = deltas(IncrementalDetokenizer(tokenizer), token_ids)
        assert "\ufffd" not in "".join(shown)
        assert "".join(shown) == tokenizer.decode(token_ids) == text


def test_a_character_comes_whole_with_its_last_byte(
    byte_level: Tokenizer, sentence_piece: Tokenizer
) -> None:
    for tokenizer in (byte_level, sentence_piece):
        token_ids = tokenizer.encode("𝄞𝄞")[-8:]
        shown = deltas(IncrementalDetokenizer(tokenizer), token_ids)
        assert shown == ["", "", "", "𝄞", "", "", "", "𝄞", ""]


def test_an_unfinished_character_comes_as_a_replacement_at_the_end(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("a𝄞")[:-1]
    assert deltas(IncrementalDetokenizer(byte_level), token_ids)[-1] == "\ufffd"


def test_a_real_replacement_character_is_kept(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("a\ufffdb\ufffd")
    assert "".join(deltas(IncrementalDetokenizer(byte_level), token_ids)) == "a\ufffdb\ufffd"


def test_each_token_costs_a_few_however_long_the_answer(byte_level: Tokenizer) -> None:
    metered = MeteredTokenizer(byte_level.source)
    garbage = [metered.encode("𝄞")[1]] * 300  # a byte that no character begins with
    unknown = [metered.vocab_size + 5] * 300
    for token_ids in (metered.encode("hello 你好 😀 " * 100), garbage, unknown, [0] * 300):
        shown = deltas(IncrementalDetokenizer(metered), token_ids)
        longest, metered.longest = metered.longest, 0
        assert longest <= 17
        assert "".join(shown) == metered.decode(token_ids)
        metered.longest = 0


def test_special_tokens_are_skipped_only_if_asked_for(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("a<|end|>b")
    for skip, text in ((True, "ab"), (False, "a<|end|>b")):
        detokenizer = IncrementalDetokenizer(byte_level, skip_special_tokens=skip)
        assert detokenizer.append(token_ids, finished=True) == text


def test_a_skipped_token_between_words_keeps_the_space(sentence_piece: Tokenizer) -> None:
    word = sentence_piece.encode("hello", add_special_tokens=False)
    token_ids = [*word, *[sentence_piece.eos_token_ids[0]] * 20, *word]
    assert "".join(deltas(IncrementalDetokenizer(sentence_piece), token_ids)) == "hello hello"


def test_after_a_prompt_the_first_word_keeps_its_space(sentence_piece: Tokenizer) -> None:
    word = sentence_piece.encode("hello", add_special_tokens=False)
    alone = IncrementalDetokenizer(sentence_piece)
    continued = IncrementalDetokenizer(sentence_piece, prompt_token_ids=word * 10)
    assert alone.append(word, finished=True) == "hello"
    assert continued.append(word, finished=True) == " hello"


def test_a_character_that_the_prompt_began_is_finished_by_the_answer(byte_level: Tokenizer) -> None:
    token_ids = byte_level.encode("ab𝄞c")
    for cut in range(2, 6):
        detokenizer = IncrementalDetokenizer(byte_level, prompt_token_ids=token_ids[:cut])
        assert "".join(deltas(detokenizer, token_ids[cut:])) == "𝄞c"


def test_the_answer_is_cut_at_a_stop_string_across_tokens(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level, stop=("o w",))
    shown = deltas(detokenizer, byte_level.encode("hello world"))
    assert "".join(shown) == "hell"
    assert detokenizer.stop_string == "o w"


def test_a_stop_string_is_shown_if_asked_for(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level, stop=("wor",), include_stop_str_in_output=True)
    assert detokenizer.append(byte_level.encode("hello world"), finished=False) == "hello wor"


def test_what_may_begin_a_stop_string_comes_when_the_answer_ends(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level, stop=("worlds",))
    shown = deltas(detokenizer, byte_level.encode("hello world"))
    assert "".join(shown[:-1]) == "hello "
    assert shown[-1] == "world"
    assert detokenizer.stop_string is None


@pytest.mark.parametrize(("min_tokens", "shown"), [(0, "a"), (1, "a"), (2, "a.b"), (4, "a.b.c")])
def test_no_token_up_to_min_tokens_ends_the_answer(
    byte_level: Tokenizer, min_tokens: int, shown: str
) -> None:
    token_ids = [byte_level.encode(letter)[0] for letter in "a.b.c"]
    detokenizer = IncrementalDetokenizer(byte_level, stop=(".",), min_tokens=min_tokens)
    assert "".join(deltas(detokenizer, token_ids)) == shown


def test_an_answer_without_tokens_has_no_text(byte_level: Tokenizer) -> None:
    assert IncrementalDetokenizer(byte_level, stop=("x",)).append([], finished=True) == ""


def test_an_unfinished_character_of_the_prompt_is_no_text_of_the_answer(
    byte_level: Tokenizer,
) -> None:
    prompt, end = byte_level.encode("ab𝄞")[:-1], byte_level.special_token_id("<|end|>")
    assert end is not None
    for answer in ([], [end]):
        detokenizer = IncrementalDetokenizer(byte_level, prompt_token_ids=prompt)
        assert "".join(deltas(detokenizer, answer)) == ""
