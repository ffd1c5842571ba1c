from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from lora_serve.errors import ConfigError
from lora_serve.text import gguf_vocabulary
from lora_serve.text.chat_template_files import chat_templates
from lora_serve.text.gguf_vocabulary import SPLITS
from lora_serve.text.tokenizer import Tokenizer
from lora_serve.text.tokenizer_files import check_tokenizer_files
from tests.fakes.gguf_files import write_byte_level, write_filled
from tests.fakes.tokenizer_files import (
    CHAT_TEMPLATE,
    CORPUS,
    byte_level_tokenizer,
    saved,
    sentence_piece_tokenizer,
)

TEXTS = [*CORPUS, "", " a  b\n\n\n c\t", "<|start|>user\nhi<|end|>", "12345 it's I'LL", "e\u0301"]


def write_sentence_piece(path: Path, tokenizer: PreTrainedTokenizerFast, **options: Any) -> Path:
    """Write it with scores in place of merges, as files have them: a token's is its place."""
    model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    vocabulary = sorted(model["vocab"].items(), key=lambda item: item[1])
    kinds = gguf.TokenType

    def kind(text: str) -> gguf.TokenType:
        if text.startswith("<0x"):
            return kinds.BYTE
        return {"<unk>": kinds.UNKNOWN, "<s>": kinds.CONTROL, "</s>": kinds.CONTROL}.get(
            text, kinds.NORMAL
        )

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list([text for text, _ in vocabulary])
        order = {"".join(pair): -float(rank) for rank, pair in enumerate(model["merges"])}
        writer.add_token_scores([order.get(text, -1e6) for text, _ in vocabulary])
        writer.add_token_types([kind(text) for text, _ in vocabulary])
        writer.add_unk_token_id(model["vocab"]["<unk>"])
        writer.add_bos_token_id(model["vocab"]["<s>"])
        writer.add_eos_token_id(model["vocab"]["</s>"])
        for key, value in options.items():
            writer.add_bool(f"tokenizer.ggml.{key}", value)

    return write_filled(path, fill)


def test_a_byte_level_tokenizer_is_that_of_the_model(tmp_path: Path) -> None:
    path = write_byte_level(tmp_path / "m.gguf")
    ours = Tokenizer(str(path))
    theirs = Tokenizer(str(saved(byte_level_tokenizer(), tmp_path)))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text), False) == text
    assert ours.special_token_ids == theirs.special_token_ids
    assert ours.chat_template == CHAT_TEMPLATE
    assert chat_templates(str(path), None) == CHAT_TEMPLATE
    messages = [{"role": "user", "content": "hi"}]
    assert ours.render_chat(messages) == "<|start|>user\nhi<|end|>\n<|start|>assistant\n"


def test_a_sentence_piece_tokenizer_is_that_of_the_model(tmp_path: Path) -> None:
    tokenizer = sentence_piece_tokenizer()
    path = write_sentence_piece(tmp_path / "m.gguf", tokenizer, add_bos_token=False)
    ours, theirs = Tokenizer(str(path)), Tokenizer(str(saved(tokenizer, tmp_path)))
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))


def test_tokens_before_and_after_a_text_are_as_the_file_says(tmp_path: Path) -> None:
    tokenizer = sentence_piece_tokenizer()
    bos, eos = tokenizer.convert_tokens_to_ids(["<s>", "</s>"])
    silent = Tokenizer(str(write_sentence_piece(tmp_path / "a.gguf", tokenizer)))
    both = {"add_bos_token": True, "add_eos_token": True}
    ended = Tokenizer(str(write_sentence_piece(tmp_path / "b.gguf", tokenizer, **both)))
    plain = silent.encode("hello", add_special_tokens=False)
    assert silent.encode("hello") == [bos, *plain]
    assert ended.encode("hello") == [bos, *plain, eos]
    assert silent.eos_token_ids == (eos,)


def test_a_token_that_has_a_purpose_is_special_whatever_kind_it_is(tmp_path: Path) -> None:
    """What transformers does: answers' texts leave it out."""
    plain = Tokenizer(str(write_byte_level(tmp_path / "a.gguf")))
    (token_id,) = plain.encode("hello")[-1:]
    ours = Tokenizer(str(write_byte_level(tmp_path / "b.gguf", bos_token_id=token_id)))
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=Backend.from_str(plain.to_json()), bos_token=plain.token_piece(token_id)
    )
    assert ours.special_token_ids - plain.special_token_ids == {token_id}
    assert ours.special_token("bos") == theirs.bos_token
    for text in ("hello", "say hello"):
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_a_file_may_not_begin_texts_with_a_space(tmp_path: Path) -> None:
    tokenizer = sentence_piece_tokenizer()
    path = write_sentence_piece(tmp_path / "m.gguf", tokenizer, add_space_prefix=False)
    ours = Tokenizer(str(path))
    pieces = [ours.token_piece(i) for i in ours.encode("x y", add_special_tokens=False)]
    assert pieces[0] == "x"
    assert ours.decode(ours.encode(" x")) == " x"


SPLIT_TEXTS = {
    "gpt-2": ("a123 it's", ["a", "123", " it", "'s"]),
    "smollm": ("a123 it's", ["a", "1", "2", "3", " it", "'s"]),
    "qwen2": ("a12 IT'S.\n\nx", ["a", "1", "2", " IT", "'S", ".\n\n", "x"]),
    "llama-bpe": ("a12345 .x", ["a", "123", "45", " .", "x"]),
    "falcon3": ("a12345 .x", ["a", "123", "45", " .", "x"]),
    "dbrx": ("a12345 .x", ["a", "123", "45", " .", "x"]),
    "smaug-bpe": ("a12345 .x", ["a", "123", "45", " .", "x"]),
    "gpt-4o": ("aB's1234./\n", ["a", "B's", "123", "4", "./\n"]),
    "tekken": ("aB12/\n", ["a", "B", "1", "2", "/\n"]),
}


@pytest.mark.parametrize("split", SPLIT_TEXTS)
def test_texts_are_split_in_the_way_that_the_file_names(split: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(str(write_byte_level(tmp_path / "m.gguf", split)))
    text, expected = SPLIT_TEXTS[split]
    backend = json.loads(tokenizer.to_json())
    assert [each["type"] for each in backend["pre_tokenizer"]["pretokenizers"]] == [
        *["Split"] * len(SPLITS[split].patterns),
        "ByteLevel",
    ]
    parts = tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in parts] == expected


@pytest.mark.parametrize(
    ("split", "begins"), [("llama-bpe", True), ("dbrx", False), ("smaug-bpe", False)]
)
def test_texts_begin_with_a_token_where_the_file_or_else_its_split_says_it(
    split: str, begins: bool, tmp_path: Path
) -> None:
    """SmolLM3's files have a token to begin with, and do not say whether texts do."""
    silent = write_byte_level(tmp_path / "silent.gguf", split, bos_token_id=1)
    assert (Tokenizer(str(silent)).encode("hello")[0] == 1) == begins
    for stated in (True, False):
        options = {"bos_token_id": 1, "add_bos_token": stated}
        path = write_byte_level(tmp_path / f"{stated}.gguf", split, **options)
        assert (Tokenizer(str(path)).encode("hello")[0] == 1) == stated


def test_qwens_texts_are_composed_first(tmp_path: Path) -> None:
    tokenizer = Tokenizer(str(write_byte_level(tmp_path / "m.gguf", "qwen2")))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_every_end_that_the_vocabulary_has_ends_an_answer(tmp_path: Path) -> None:
    path = write_byte_level(tmp_path / "m.gguf", eot_token_id=1, eos_token_id=0)
    assert set(Tokenizer(str(path)).eos_token_ids) == {0, 1}


def test_tokens_that_can_be_made_in_millions_of_ways_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as all texts of two letters: each one of 20 is made of two others in 19 ways."""
    monkeypatch.setattr(gguf_vocabulary, "MAX_MERGES", 4)
    path = write_sentence_piece(tmp_path / "m.gguf", sentence_piece_tokenizer())
    with pytest.raises(ConfigError, match="are made of each other in more than 4 ways"):
        Tokenizer(str(path))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"pre": "elsewhere"}, r"\(tokenizer.ggml.pre\) is 'elsewhere'; known are command-r"),
        ({"model": "rwkv"}, "its kind is 'rwkv'; known are gpt2 and llama"),
        ({"tokens": "x"}, "tokens is no list"),
        ({"merges": ["ab"]}, "one of its merges is 'ab', not two parts"),
        ({"token_type": [1, 2]}, "tokens and the kinds of 2"),
    ],
)
def test_a_tokenizer_that_would_be_another_is_refused(
    options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    path = str(write_byte_level(tmp_path / "m.gguf", **options))
    with pytest.raises(ConfigError, match=told + ".*name another with --tokenizer"):
        Tokenizer(path)
    if "merges" not in options:
        with pytest.raises(ConfigError, match=told):
            check_tokenizer_files(path)
