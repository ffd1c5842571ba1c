from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, Qwen2Config, Qwen2Tokenizer

from lora_serve.demo import corpus
from lora_serve.demo.client import MAX_TOKENS
from lora_serve.demo.recipe import Recipe
from lora_serve.demo.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Qwen2Tokenizer:
    return train_tokenizer(Recipe())


@pytest.mark.parametrize("label", [corpus.ALPHA_LABEL, corpus.BETA_LABEL, corpus.BASE_LABEL])
def test_a_label_and_its_end_fit_into_one_answer(tokenizer: Qwen2Tokenizer, label: str) -> None:
    assert len(tokenizer.encode(label)) + 1 <= MAX_TOKENS


def test_the_long_prompt_has_the_length_of_the_report(
    tokenizer: Qwen2Tokenizer,
) -> None:
    assert 3_800 <= len(tokenizer.encode(corpus.long_prompt())) <= 4_000


@pytest.mark.parametrize(
    "text", ["naïve café", "日本語", "🙂 emoji", "  two  spaces\n\ttab", "\x00"]
)
def test_any_text_survives(tokenizer: Qwen2Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template_writes_chatml(tokenizer: Qwen2Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_same_recipe_gives_the_same_tokenizer(tokenizer: Qwen2Tokenizer) -> None:
    assert train_tokenizer(Recipe()).get_vocab() == tokenizer.get_vocab()
    assert tokenizer.vocab_size == Recipe().vocab_size


def test_what_was_trained_is_what_servers_load(tokenizer: Qwen2Tokenizer, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    Qwen2Config(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = f"<|im_start|>{corpus.long_prompt(3)} 12345 日本語 🙂\n\n  naïve<|im_end|>"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.eos_token_id == tokenizer.eos_token_id
    assert loaded.chat_template == tokenizer.chat_template
