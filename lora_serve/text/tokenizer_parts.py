"""What a model's files say of its tokenizer, whatever library read them."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer

from lora_serve.chat.model_template import ModelTemplate


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """backend: the taker's own. class_name: as transformers calls it."""

    backend: Tokenizer
    template: ModelTemplate
    eos_token_id: int | None
    class_name: str
