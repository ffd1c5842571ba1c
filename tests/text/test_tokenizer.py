from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from lora_serve.errors import ConfigError, InvalidRequestError
from lora_serve.text.tokenizer import Tokenizer
from tests.fakes.tokenizer_files import byte_level_tokenizer


def write(directory: Path, filename: str, content: object) -> None:
    (directory / filename).write_text(json.dumps(content))


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=50), add_special_tokens=st.booleans())
def test_ids_and_texts_are_those_of_transformers(
    byte_level: Tokenizer, sentence_piece: Tokenizer, text: str, add_special_tokens: bool
) -> None:
    for tokenizer in (byte_level, sentence_piece):
        theirs = AutoTokenizer.from_pretrained(tokenizer.source)
        token_ids = tokenizer.encode(text, add_special_tokens)
        assert token_ids == theirs.encode(text, add_special_tokens=add_special_tokens)
        assert tokenizer.decode(token_ids) == theirs.decode(token_ids, skip_special_tokens=True)


def test_special_tokens_are_added_unless_told_not_to(directory: Path) -> None:
    content = json.loads((directory / "tokenizer.json").read_text())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|start|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|start|>": {"id": "<|start|>", "ids": [1], "tokens": ["<|start|>"]}},
    }
    write(directory, "tokenizer.json", content)
    tokenizer = Tokenizer(str(directory))
    assert tokenizer.encode("hello") == [1, *tokenizer.encode("hello", add_special_tokens=False)]


def test_truncation_and_padding_of_the_file_do_not_apply(directory: Path) -> None:
    backend = byte_level_tokenizer().backend_tokenizer
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(directory / "tokenizer.json"))
    tokenizer = Tokenizer(str(directory))
    assert tokenizer.decode(tokenizer.encode("a b c d e f")) == "a b c d e f"


def test_threads_encode_and_decode_at_once(byte_level: Tokenizer) -> None:
    texts = [f"hello {number} 你好 " * 20 for number in range(200)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(byte_level.encode, texts))
        assert list(pool.map(byte_level.decode, found)) == texts


@pytest.mark.parametrize("kind", ["llama3", "yarn", "longrope"])
def test_rope_scaling_as_transformers_4_wrote_it_is_no_tokenizers_matter(
    directory: Path, kind: str
) -> None:
    scaling = {"rope_type": kind, "factor": 8.0, "original_max_position_embeddings": 64}
    write(
        directory,
        "config.json",
        {"model_type": "llama", "rope_theta": 10000.0, "rope_scaling": scaling},
    )
    write(directory, "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    tokenizer = Tokenizer(str(directory))
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_a_text_on_which_the_tokenizers_own_pattern_gives_up_is_refused(directory: Path) -> None:
    content = json.loads((directory / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$|(x+x+)+y"},
        "behavior": "Isolated",
        "invert": False,
    }
    write(directory, "tokenizer.json", content)
    with pytest.raises(
        InvalidRequestError, match=r"tokenizer gives up on this text: .*retry-limit"
    ):
        Tokenizer(str(directory)).encode("a" * 30 + "!")


def test_half_a_character_is_refused_with_its_place(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="lone surrogate at character 2"):
        byte_level.encode("ab\ud83d")


def test_a_negative_or_enormous_id_is_refused(byte_level: Tokenizer) -> None:
    for token_id in (-1, 2**40):
        with pytest.raises(InvalidRequestError, match=rf"must be in \[0, .*{token_id}"):
            byte_level.decode([5, token_id])


def test_an_unknown_id_has_no_text(byte_level: Tokenizer) -> None:
    assert byte_level.decode([byte_level.vocab_size]) == ""
    assert byte_level.token_text(byte_level.vocab_size) == ""
    assert byte_level.token_bytes(byte_level.vocab_size) == b""


def test_a_missing_directory_is_named() -> None:
    with pytest.raises(ConfigError, match="no tokenizer at /no/such/model: there is no such dir"):
        Tokenizer("/no/such/model")


@pytest.mark.parametrize("files", [{}, {"tokenizer.json": "{ nope"}, {"tokenizer.json": "{}"}])
def test_a_missing_or_broken_tokenizer_is_one_clear_line(
    tmp_path: Path, files: dict[str, str]
) -> None:
    for filename, content in files.items():
        (tmp_path / filename).write_text(content)
    with pytest.raises(ConfigError, match="cannot load a tokenizer from") as caught:
        Tokenizer(str(tmp_path))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_without_its_tokenizer_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]})
    with pytest.raises(ConfigError, match=r"has no tokens; is its tokenizer\.json missing"):
        Tokenizer(str(tmp_path))


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
def test_no_token_stands_for_more_characters_than_is_said(
    kind: str, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(kind)
    longest = max(len(tokenizer.token_text(i)) for i in range(tokenizer.vocab_size))
    assert longest <= tokenizer.max_token_chars < 40
