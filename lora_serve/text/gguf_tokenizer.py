"""Makes a tokenizer, and the chat template, of what a GGUF file says of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

from lora_serve.chat.model_template import ModelTemplate
from lora_serve.text.gguf_vocabulary import BYTE, CONTROL, SPACE, USER_DEFINED, GgufVocabulary
from lora_serve.text.tokenizer_parts import TokenizerParts

# As transformers calls them, and as GGUF does.
_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_CLASS = "TokenizersBackend"  # what transformers makes of such files


def gguf_tokenizer(path: Path) -> TokenizerParts:
    """The tokenizer of a GGUF file, with its chat template.

    Raises:
        ConfigError: the file is broken, has no tokenizer, or one of a kind that is not known.
    """
    vocabulary = GgufVocabulary(path)
    is_bytes = vocabulary.model == "gpt2"
    tokenizer = _byte_level(vocabulary) if is_bytes else _sentence_piece(vocabulary)
    for kind in (USER_DEFINED, CONTROL):
        texts = vocabulary.of_kind(kind)
        tokenizer.add_tokens(
            [AddedToken(text, normalized=False, special=kind == CONTROL) for text in texts]
        )
    _add_ends(tokenizer, vocabulary)
    special = {
        f"{ours}_token": text
        for ours, theirs in _SPECIAL.items()
        if (text := vocabulary.special(theirs)) is not None
    }
    _add_special(tokenizer, special.values())
    eos = special.get("eos_token")
    return TokenizerParts(
        tokenizer,
        ModelTemplate(vocabulary.chat_template, special),
        None if eos is None else tokenizer.token_to_id(eos),
        _CLASS,
    )


def _add_special(tokenizer: Tokenizer, texts: Iterable[str]) -> None:
    """Have tokens that have a purpose left out of answers' texts, also those of no special kind."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    new = [text for text in dict.fromkeys(texts) if text not in known]
    tokenizer.add_tokens([AddedToken(text, special=True) for text in new])


def _byte_level(vocabulary: GgufVocabulary) -> Tokenizer:
    split = vocabulary.split
    tokenizer = Tokenizer(
        BPE(
            vocab={text: index for index, text in enumerate(vocabulary.tokens)},
            merges=vocabulary.merges(),
            ignore_merges=split.has_whole_words,
        )
    )
    if split.is_composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(each), "isolated") for each in split.patterns]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(vocabulary: GgufVocabulary) -> Tokenizer:
    # Gemma's tokens of several spaces are stored with spaces.
    tokens = [
        text.replace(" ", SPACE) if vocabulary.is_gemma and not text.strip(" ") else text
        for text in vocabulary.tokens
    ]
    tokenizer = Tokenizer(
        BPE(
            vocab={text: index for index, text in enumerate(tokens)},
            merges=vocabulary.merges() or vocabulary.merges_of_scores(tokens),
            unk_token=vocabulary.special("unknown"),
            fuse_unk=True,
            byte_fallback=BYTE in vocabulary.kinds,
        )
    )
    replaced = normalizers.Replace(" ", SPACE)
    begun = normalizers.Sequence([normalizers.Prepend(SPACE), replaced])
    tokenizer.normalizer = begun if vocabulary.adds_space else replaced
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        + [decoders.Strip(" ", 1, 0)] * vocabulary.adds_space
    )
    return tokenizer


def _add_ends(tokenizer: Tokenizer, vocabulary: GgufVocabulary) -> None:
    before, after = vocabulary.ends()
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, "$B:1", *(f"{text}:1" for text in after)],
            special_tokens=[(text, vocabulary.tokens.index(text)) for text in {*before, *after}],
        )
