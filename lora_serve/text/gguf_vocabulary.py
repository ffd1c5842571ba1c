"""The vocabulary that a GGUF file holds, checked: its tokens, merges, special tokens and template.

A file names the way texts are split before tokens are looked up; the rules behind that name are
here. A name that is not known is refused: with another split, a model reads tokens that it never
saw. Knows no tokenizer library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar, cast

from lora_serve.errors import ConfigError
from lora_serve.gguf.header import Value, read_header

_PREFIX = "tokenizer.ggml"
NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6  # kinds of tokens
SPACE = "\u2581"  # how SentencePiece writes a space
MAX_MERGED_CHARS = 256  # longer tokens are of spaces or an attacker's; ways to split them are many
MAX_MERGES = 2**21  # made of scores; Gemma's vocabulary makes a quarter of that
_END_TOKENS = ("eos", "eot", "eom")
# What llama.cpp takes for the end of an answer wherever a vocabulary has it.
_END_TEXTS = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"}
)
_Item = TypeVar("_Item", str, int, float)

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS[0]}*{_LETTERS[1]}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_LETTERS[0]}+{_LETTERS[1]}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_LETTERS[0]}*{_LETTERS[1]}+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_LETTERS[0]}+{_LETTERS[1]}*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Split:
    """patterns: each splits the parts that the one before it made.

    has_whole_words: a part that is in the vocabulary is that token, whatever the merges make of it.
    is_composed: texts are brought to Unicode's composed form first. adds_bos: where the file does
    not say.
    """

    patterns: tuple[str, ...]
    has_whole_words: bool = False
    is_composed: bool = False
    adds_bos: bool = False


_GPT4 = Split((rf"{_CONTRACTIONS}|\p{{N}}{{1,3}}|{_REST}",))
_LLAMA3 = Split(_GPT4.patterns, has_whole_words=True, adds_bos=True)
# SmolLM3's files. Words are whole as in Llama 3's vocabulary, from which the model took its own;
# llama.cpp goes by merges, which differ for the few tokens that no merges make.
_SMAUG = Split(_GPT4.patterns, has_whole_words=True)
_QWEN2 = Split((rf"{_CONTRACTIONS}|\p{{N}}|{_REST}",), is_composed=True)
_DIGITS = Split((r"\p{N}", _GPT2))
_PLAIN = Split((_GPT2,))
# By tokenizer.ggml.pre. Source: github.com/ggml-org/llama.cpp, src/llama-vocab.cpp
SPLITS: Mapping[str, Split] = MappingProxyType(
    {
        "command-r": _DIGITS,
        "dbrx": _GPT4,
        "deepseek-r1-qwen": _QWEN2,
        "falcon3": _LLAMA3,
        "glm4": _GPT4,
        "gpt-2": _PLAIN,
        "gpt-4o": Split((_GPT4O,)),
        "llama-bpe": _LLAMA3,
        "llama-v3": _LLAMA3,
        "llama3": _LLAMA3,
        "olmo": _PLAIN,
        "qwen2": _QWEN2,
        "refact": _DIGITS,
        "smaug-bpe": _SMAUG,
        "smollm": _DIGITS,
        "starcoder": _DIGITS,
        "tekken": Split((_TEKKEN,), has_whole_words=True, adds_bos=True),
    }
)


class GgufVocabulary:
    """A vocabulary, as a file's metadata has it.

    model: "gpt2" for merges of bytes, "llama" for SentencePiece. kinds: of each token, as the
    format numbers them.

    Raises:
        ConfigError: there is none, or it is of a kind that is not known, or broken.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._metadata = read_header(path).metadata
        self.model = str(self._get("model", "none"))
        self._check_kind()
        self.tokens: Sequence[str] = self._list("tokens", str)
        self.kinds = self._list("token_type", int) or [NORMAL] * len(self.tokens)
        if not self.tokens or len(self.kinds) != len(self.tokens):
            raise self._refused(
                f"it has {len(self.tokens):,} tokens and the kinds of {len(self.kinds):,}"
            )

    @property
    def chat_template(self) -> str | None:
        template = self._metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    @property
    def is_gemma(self) -> bool:
        return str(self._metadata.get("general.architecture")).startswith("gemma")

    @property
    def adds_space(self) -> bool:
        """Whether SentencePiece begins a text with a space."""
        return bool(self._get("add_space_prefix", True))

    @property
    def split(self) -> Split:
        """How a vocabulary of bytes splits texts."""
        return SPLITS[str(self._get("pre", "none"))]

    def of_kind(self, kind: int) -> list[str]:
        return [text for text, found in zip(self.tokens, self.kinds, strict=True) if found == kind]

    def special(self, purpose: str) -> str | None:
        """The text of the token for a purpose, as the metadata calls it."""
        token_id = self._get(f"{purpose}_token_id", None)
        if not isinstance(token_id, int) or not 0 <= token_id < len(self.tokens):
            return None
        return self.tokens[token_id]

    def end_token_ids(self) -> list[int]:
        """The tokens that end an answer."""
        texts = {self.special(purpose) for purpose in _END_TOKENS} | _END_TEXTS
        return [
            token_id
            for token_id, (text, kind) in enumerate(zip(self.tokens, self.kinds, strict=True))
            if text in texts and kind in (CONTROL, USER_DEFINED)
        ]

    def ends(self) -> tuple[list[str], list[str]]:
        """The tokens that are added before and after a text."""
        begins = self.model == "llama" or self.split.adds_bos
        return self._end("bos", begins), self._end("eos", False)

    def merges(self) -> list[tuple[str, str]]:
        merges = []
        for text in self._list("merges", str):
            left, space, right = text.partition(" ")
            if not (left and space and right):
                raise self._refused(f"one of its merges is {text[:80]!r}, not two parts")
            merges.append((left, right))
        return merges

    def merges_of_scores(self, tokens: Sequence[str]) -> list[tuple[str, str]]:
        """Each way to make a token of two others, the best token first.

        Gemma's scores do not follow the order of its merges; the order of its tokens does.
        """
        scores = self._list("scores", float)
        if len(scores) != len(tokens):
            raise self._refused(f"it has {len(tokens):,} tokens and {len(scores):,} scores")
        ids = {text: index for index, text in enumerate(tokens)}
        merges: list[tuple[float, int, int, int, int]] = []
        for index, text in enumerate(tokens):
            order = float(index) if self.is_gemma else -scores[index]
            merges += [
                (order, cut, len(text) - cut, ids[text[:cut]], ids[text[cut:]])
                for cut in range(1, len(text) * (len(text) <= MAX_MERGED_CHARS))
                if text[:cut] in ids and text[cut:] in ids
            ]
            if len(merges) > MAX_MERGES:
                raise self._refused(
                    f"its {len(tokens):,} tokens are made of each other in more than "
                    f"{MAX_MERGES:,} ways"
                )
        merges.sort(key=_order_of_merge)
        return [(tokens[left], tokens[right]) for *_, left, right in merges]

    def _check_kind(self) -> None:
        if self.model == "gpt2":
            split = str(self._get("pre", "none"))
            if split not in SPLITS:
                raise self._refused(
                    f"its way to split texts (tokenizer.ggml.pre) is {split[:80]!r}; known are "
                    f"{', '.join(SPLITS)}"
                )
        elif self.model != "llama":
            raise self._refused(f"its kind is {self.model[:80]!r}; known are gpt2 and llama")

    def _end(self, purpose: str, default: bool) -> list[str]:
        text = self.special(purpose)
        return [text] if self._get(f"add_{purpose}_token", default) and text is not None else []

    def _get(self, name: str, default: Value | None) -> Value | None:
        return self._metadata.get(f"{_PREFIX}.{name}", default)

    def _list(self, name: str, kind: type[_Item]) -> list[_Item]:
        values = self._get(name, [])
        if not isinstance(values, list):
            raise self._refused(f"{_PREFIX}.{name} is no list")
        if not set(map(type, values)) <= {kind}:
            raise self._refused(f"{_PREFIX}.{name} is no list of {kind.__name__}")
        return cast("list[_Item]", values)

    def _refused(self, reason: str) -> ConfigError:
        return ConfigError(
            f"{self._path}: its tokenizer cannot be used: {reason}; name another with --tokenizer"
        )


def _order_of_merge(merge: tuple[float, int, int, int, int]) -> tuple[float, int, int]:
    return merge[:3]
