from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_serve.errors import ConfigError
from lora_serve.text.tokenizer import Tokenizer


def write(directory: Path, filename: str, content: object) -> None:
    (directory / filename).write_text(json.dumps(content))


def test_end_tokens_come_from_tokenizer_generation_config_and_config(directory: Path) -> None:
    write(directory, "generation_config.json", {"eos_token_id": [7, 0, 9]})
    write(directory, "config.json", {"model_type": "llama", "eos_token_id": 11})
    assert Tokenizer(str(directory)).eos_token_ids == (0, 7, 9, 11)


@pytest.mark.parametrize("wrong", [900, -1, 2**40, True, "7", 1.0])
def test_an_end_token_that_the_model_has_not_is_told_and_left_out(
    directory: Path, wrong: object
) -> None:
    """-1 would forbid the last token until min_tokens, and grammars know no such token."""
    write(directory, "generation_config.json", {"eos_token_id": [wrong, 5]})
    write(directory, "config.json", {"model_type": "llama", "vocab_size": 900})
    tokenizer = Tokenizer(str(directory))
    assert tokenizer.eos_token_ids == (0, 5)
    assert tokenizer.warnings == (
        f"generation_config.json: eos_token_id {wrong!r} is none of the model's 900 tokens, so no "
        "answer ends by it; correct the file",
    )
    write(directory, "config.json", {"model_type": "x", "text_config": {"vocab_size": 2**41}})
    assert bool(Tokenizer(str(directory)).warnings) == (wrong not in (900, 2**40))


def test_end_tokens_are_the_tokenizers_without_other_files(directory: Path) -> None:
    tokenizer = Tokenizer(str(directory))
    assert tokenizer.eos_token_ids == (0,)
    assert tokenizer.decode([0], skip_special_tokens=False) == "<|end|>"


def test_sampling_defaults_have_our_names(directory: Path) -> None:
    write(
        directory,
        "generation_config.json",
        {"temperature": 0.6, "top_k": 20, "max_new_tokens": 99, "do_sample": True, "top_p": None},
    )
    assert Tokenizer(str(directory)).generation_defaults == {
        "temperature": 0.6,
        "top_k": 20,
        "max_tokens": 99,
    }


def test_ends_and_defaults_come_from_the_model_if_it_lies_elsewhere(
    directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model = tmp_path_factory.mktemp("model")
    write(model, "generation_config.json", {"eos_token_id": 5, "temperature": 0.5})
    tokenizer = Tokenizer(str(directory), model=str(model))
    assert tokenizer.eos_token_ids == (0, 5)
    assert tokenizer.generation_defaults == {"temperature": 0.5}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "must hold a JSON object, not a list"),
        ('{"top_p": "much"}', "top_p must be a number, got 'much'"),
        ('{"top_k": true}', "top_k must be a number, got True"),
    ],
)
def test_a_broken_generation_config_is_an_error(
    directory: Path, content: str, message: str
) -> None:
    (directory / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        Tokenizer(str(directory))
