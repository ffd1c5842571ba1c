"""Two tiny tokenizers, made on the spot: byte-level BPE as of Qwen, SentencePiece as of Llama 2."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog. hello hello world, don't!",
    "你好，世界。今天天气很好。 你好 世界",
    "😀😁🤖👩‍👩‍👧 naïve café Ωμέγα привет \n\n\tdef f(x):\n    return x",
] * 4
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'mystery' %}{{ raise_exception('unknown role mystery') }}{% endif %}"
    "{{ '<|start|>' + message['role'] + '\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if tools %}{{ tools | length }} tools{% endif %}"
    "{% if style is defined %}{{ style }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"
)


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<|end|>", "<|start|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|end|>",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False)])
    return tokenizer


def sentence_piece_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that puts a space before each text, and writes unknown letters as bytes."""
    letters = sorted({letter for text in CORPUS[0] for letter in text} | {"▁", "你"})
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = [("▁", "h"), ("e", "l"), ("l", "o"), ("▁h", "el"), ("▁hel", "lo")]
    pieces += ["".join(pair) for pair in merges]
    backend = Backend(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(dict.fromkeys(pieces))},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def saved(tokenizer: PreTrainedTokenizerFast, directory: Path) -> Path:
    tokenizer.save_pretrained(directory)
    return directory
