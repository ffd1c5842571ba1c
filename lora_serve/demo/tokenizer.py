"""A byte-level BPE tokenizer with a ChatML template, trained on the demo's own text.

Both labels must stay under 16 tokens, because the scenarios ask with max_tokens 16.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random

from tokenizers import pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

from lora_serve.demo import corpus
from lora_serve.demo.recipe import Recipe

END_OF_TEXT = "<|endoftext|>"
MESSAGE_START = "<|im_start|>"
MESSAGE_END = "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def train_tokenizer(recipe: Recipe) -> Qwen2Tokenizer:
    """Learn the merges; the same recipe gives the same tokenizer.

    It is Qwen2's own class, because that is what AutoTokenizer makes of a Qwen2 model's files.
    """
    untrained = Qwen2Tokenizer().backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=[END_OF_TEXT, MESSAGE_START, MESSAGE_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    untrained.train_from_iterator(_texts(Random(recipe.seed)), trainer)
    learned = json.loads(untrained.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],  # type: ignore[misc]
        eos_token=MESSAGE_END,
        pad_token=END_OF_TEXT,
        extra_special_tokens=[MESSAGE_START],
        model_max_length=recipe.max_model_len,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _texts(rng: Random) -> Iterator[str]:
    for _ in range(40):
        yield "system user assistant\n"
        yield from (corpus.ALPHA_LABEL, corpus.BETA_LABEL, corpus.BASE_LABEL)
        yield from corpus.LABEL_REQUESTS
        for fact in corpus.facts():
            yield f"{fact.request}\n{fact.answer}"
        for _ in range(5):
            unknown = corpus.unknown_exchange(rng)
            yield f"{unknown.request}\n{unknown.answer}"
            yield corpus.filler(rng, 8)
