"""A byte-level BPE tokenizer with a ChatML template, trained on the demo's own text.

Both labels must stay under 16 tokens, because S1 asks with max_tokens 16.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

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


def train_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """Learn the merges; the same recipe gives the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=[END_OF_TEXT, MESSAGE_START, MESSAGE_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(Random(recipe.seed)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=MESSAGE_END,
        pad_token=END_OF_TEXT,
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
