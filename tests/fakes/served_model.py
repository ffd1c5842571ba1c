"""A random model with a real tokenizer, in a directory that a server can be pointed at."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.fakes.tiny_models import ALL_MODELS, save

END = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def save_served_model(directory: Path, family: str = "qwen2") -> Path:
    """A tiny model of `family`, whose tokens are ASCII's bytes and one end token."""
    save(ALL_MODELS[family].make(), directory)
    alphabet = [*map(chr, range(33, 127)), "Ġ", "Ċ"]  # ASCII as byte-level BPE writes it
    vocabulary = {token: index for index, token in enumerate([*alphabet, END])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(directory)
    return directory
