from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, normalizers
from tokenizers.models import BPE

from lora_serve.errors import ConfigError
from lora_serve.text.normalizer_growth import MAX_GROWTH, check_growth
from lora_serve.text.tokenizer import Tokenizer as ModelTokenizer
from tests.fakes.tokenizer_files import byte_level_tokenizer, saved

LONG = "x" * (MAX_GROWTH + 1)
MULTIPLIERS = {
    "each character": normalizers.Replace(Regex("."), LONG),
    "one character": normalizers.Replace("a", LONG),
    "nothing": normalizers.Replace("", LONG),
    "what is empty": normalizers.Replace(Regex("q*"), LONG),
    "one of many": normalizers.Sequence([normalizers.NFC(), normalizers.Replace("a", LONG)]),
    "many that double": normalizers.Sequence([normalizers.Replace("a", "aa")] * 7),
    "many that look ahead": normalizers.Sequence([normalizers.Replace(Regex("(?=a)"), "b")] * 7),
    "before each part": normalizers.Prepend(LONG),
}
REAL = {
    "Llama 2": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    "Gemma": normalizers.Replace(" ", "▁"),
    "Qwen": normalizers.NFC(),
    "ALBERT": normalizers.Sequence(
        [
            *(normalizers.Replace("``", '"'), normalizers.NFKD(), normalizers.StripAccents()),
            *(normalizers.Lowercase(), normalizers.Replace(Regex(" {2,}"), " ")),
        ]
    ),
    "CLIP": normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    ),
}


def with_normalizer(normalizer: normalizers.Normalizer) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizer
    return tokenizer


@pytest.mark.parametrize("kind", MULTIPLIERS)
def test_a_normalizer_that_multiplies_text_is_refused(kind: str) -> None:
    tokenizer = with_normalizer(MULTIPLIERS[kind])
    text = "a" * 100
    assert len(tokenizer.normalizer.normalize_str(text)) > len(text), "else it need not be"
    with pytest.raises(ConfigError, match=rf"times as long, above {MAX_GROWTH}; no model's does"):
        check_growth(tokenizer, "somewhere")


@pytest.mark.parametrize("kind", REAL)
def test_normalizers_of_real_models_are_not(kind: str) -> None:
    check_growth(with_normalizer(REAL[kind]), "somewhere")


def test_rules_of_sentencepiece_count_by_their_longest_text() -> None:
    for longest, is_refused in ((33, False), (MAX_GROWTH + 1, True)):
        rules = (4).to_bytes(4, "little") + bytes(4) + b"ab\0" + b"c" * longest + b"\0"
        charsmap = base64.b64encode(rules).decode()
        state = {"type": "Precompiled", "precompiled_charsmap": charsmap}
        assert growth_is_refused(state) == is_refused


def growth_is_refused(state: dict[str, object]) -> bool:
    class Stored:
        normalizer = type("", (), {"__getstate__": lambda self: json.dumps(state)})()

    try:
        check_growth(Stored(), "somewhere")  # type: ignore[arg-type]  # the library checks the trie
    except ConfigError:
        return True
    return False


def test_a_model_with_such_a_tokenizer_is_refused(tmp_path: Path) -> None:
    directory = saved(byte_level_tokenizer(), tmp_path)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["normalizer"] = {"type": "Replace", "pattern": {"Regex": "."}, "content": "y" * 10_000}
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="may make a text 10,000 times as long"):
        ModelTokenizer(str(directory))
