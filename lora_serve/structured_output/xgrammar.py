"""Grammars by xgrammar, which is an extra: JSON schemas, regular expressions, EBNF, tags.

What xgrammar would pass over is refused before it sees it; `xgrammar_schema` and `xgrammar_regex`
know what.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import re
import time
from collections.abc import Iterator, Sequence
from random import Random

import msgspec
import numpy as np
import numpy.typing as npt
import xgrammar

from lora_serve.bitmask import bitmask_of
from lora_serve.errors import InvalidRequestError
from lora_serve.structured_output.backend import Vocabulary, refusal
from lora_serve.structured_output.structural_tag import (
    INERT_FIELDS,
    JSONSchema,
    Regex,
    parse_structural_tag,
)
from lora_serve.structured_output.xgrammar_regex import whole
from lora_serve.structured_output.xgrammar_schema import enforceable
from lora_serve.structured_outputs import StructuredOutput

Mask = npt.NDArray[np.uint8]

# Between two tokens of JSON. Without a bound weak models write blanks until their max_tokens.
_MOST_WHITESPACE = 32
_MOST_SECONDS = 0.1  # of one token; plain schemas take 0.005 with 150,000 tokens (Zen 5)
_NUM_REHEARSALS = 3
_NUM_REHEARSED_TOKENS = 24
_WORD_BITS = 32  # of xgrammar's masks
_WHERE = re.compile(r"^\[[\d:]+\] \S+: ")  # a time and a line of xgrammar's own
_LITERAL = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*')
# Notation of xgrammar's own: what comes next is only guessed by it, or tokens without a text.
_EXTENSION = re.compile(r"\(\s*=|\b\w*(?:Token|Tag)\w*\s*\(")


class XGrammarMatcher:
    def __init__(self, matcher: xgrammar.GrammarMatcher, tokens: _Tokens) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._part = b""  # of a character, which the tokens so far end with
        self._mask: bytes | None = None  # of the tokens so far, if it was asked for

    @property
    def is_finished(self) -> bool:
        if self._matcher.is_terminated():
            return True
        return self._matcher.is_completed() and not any(self._without_end(self.bitmask()))

    def bitmask(self) -> bytes:
        if self._mask is None:
            with self._limited():
                mask = self._computed_mask()
            if not any(mask) and not self._matcher.is_completed():
                raise refusal("no answer can match it")
            self._mask = mask
        return self._mask

    def accept(self, token_id: int) -> None:
        self._mask = None
        with self._limited():
            is_accepted = self._matcher.accept_token(token_id)
        if not is_accepted:
            raise refusal(f"it does not allow token {token_id} here")
        self._part = self._tokens.part_after(self._part, token_id)

    def fork(self) -> XGrammarMatcher:
        other = XGrammarMatcher(self._matcher.fork(), self._tokens)
        other._part, other._mask = self._part, self._mask
        return other

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        """Refuse a grammar that is slow here, before it is slower: xgrammar knows no limit."""
        begin = time.thread_time()
        yield
        if time.thread_time() - begin > _MOST_SECONDS:
            raise refusal(
                f"xgrammar takes more than {_MOST_SECONDS:g} s for a token of it", knows_other=True
            )

    def _computed_mask(self) -> bytes:
        words = np.full((1, -(-self._tokens.size // _WORD_BITS)), -1, np.int32)
        self._matcher.fill_next_token_bitmask(words)
        mask = words.view(np.uint8)[0, : -(-self._tokens.size // 8)]
        return (mask & self._tokens.following(self._part)).tobytes()

    def _without_end(self, mask: bytes) -> bytes:
        return (np.frombuffer(mask, np.uint8) & ~self._tokens.end).tobytes()


class _Tokens:
    """The bytes of all tokens, and which of them go on with UTF-8: xgrammar allows others, too."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.size = vocabulary.size
        self.eos_token_ids = [i for i in vocabulary.eos_token_ids if i < self.size]
        without_text = {*vocabulary.special_token_ids, *self.eos_token_ids}
        self.texts = [
            b"" if token_id in without_text else vocabulary.token_bytes(token_id)
            for token_id in range(self.size)
        ]
        self.end = self._mask(self.eos_token_ids)
        whole = [i for i, text in enumerate(self.texts) if _part_of(text) is not None]
        self._at_start = self._mask(whole)
        self._continuing = [i for i, text in enumerate(self.texts) if b"\x80" <= text[:1] < b"\xc0"]

    def part_after(self, part: bytes, token_id: int) -> bytes:
        return _part_of(part + self.texts[token_id]) or b""

    def following(self, part: bytes) -> Mask:
        """The tokens that may follow a part of a character, or none."""
        if not part:
            return self._at_start
        return self._mask(
            [i for i in self._continuing if _part_of(part + self.texts[i]) is not None]
        )

    def _mask(self, token_ids: Sequence[int]) -> Mask:
        return np.frombuffer(bitmask_of(token_ids, self.size), np.uint8)


def _part_of(text: bytes) -> bytes | None:
    """The part of a character that a text ends with; None if it is no beginning of UTF-8."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        decoder.decode(text)
    except UnicodeDecodeError:
        return None
    part = decoder.getstate()[0]
    return part if not part or _can_be_completed(part) else None


def _can_be_completed(part: bytes) -> bool:
    """Whether a character begins so; decoders look no further than at its first byte."""
    for last in (b"\x80", b"\xbf"):
        for count in (1, 2, 3):
            with contextlib.suppress(UnicodeDecodeError):
                return bool((part + last * count).decode())
    return False


class XGrammarGrammar:
    def __init__(self, grammar: xgrammar.CompiledGrammar, tokens: _Tokens) -> None:
        self._grammar = grammar
        self._tokens = tokens

    def matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(xgrammar.GrammarMatcher(self._grammar), self._tokens)


class XGrammarBackend:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens = _Tokens(vocabulary)
        info = xgrammar.TokenizerInfo(
            self._tokens.texts,
            xgrammar.VocabType.RAW,
            vocab_size=self._tokens.size,
            stop_token_ids=self._tokens.eos_token_ids,
        )
        # One thread, as it is forked for each trial; compiled grammars are kept by `GrammarCache`.
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, constraint: StructuredOutput) -> XGrammarGrammar:
        try:
            grammar = self._compiled(constraint)
        except InvalidRequestError:
            raise
        except (RuntimeError, ValueError) as error:
            if "bad_alloc" in str(error):
                raise MemoryError from error
            raise refusal(_WHERE.sub("", str(error))) from error
        compiled = XGrammarGrammar(grammar, self._tokens)
        for seed in range(_NUM_REHEARSALS):
            _rehearse(compiled.matcher(), Random(seed))
        return compiled

    def _compiled(self, constraint: StructuredOutput) -> xgrammar.CompiledGrammar:
        compiler, text = self._compiler, constraint.text
        match constraint.kind:
            case "json":
                return self._json(enforceable(text, is_lenient=not constraint.is_strict))
            case "json_object":
                return self._json('{"type":"object","additionalProperties":true}')
            case "regex":
                return compiler.compile_regex(whole(text))
            case "choice":
                choices = (json.dumps(each, ensure_ascii=False) for each in json.loads(text))
                return compiler.compile_grammar("root ::= " + " | ".join(choices))
            case "grammar":
                _require_plain(text)
                return compiler.compile_grammar(text)
            case "structural_tag":
                return compiler.compile_structural_tag(
                    {
                        "type": "structural_tag",
                        "format": _enforceable(parse_structural_tag(text)),
                    }
                )

    def _json(self, schema: str) -> xgrammar.CompiledGrammar:
        return self._compiler.compile_json_schema(schema, max_whitespace_cnt=_MOST_WHITESPACE)


def _rehearse(matcher: XGrammarMatcher, rng: Random) -> None:
    """Follow an answer, which shows a grammar that no answer can match, or that is slow.

    A token is repeated where it may be: so ambiguity grows.
    """
    token_id = -1
    for _ in range(_NUM_REHEARSED_TOKENS):
        if matcher.is_finished:
            return
        bits = np.unpackbits(np.frombuffer(matcher.bitmask(), np.uint8), bitorder="little")
        if token_id < 0 or not bits[token_id]:
            token_id = int(rng.choice(np.flatnonzero(bits)))
        matcher.accept(token_id)


def load(vocabulary: Vocabulary) -> XGrammarBackend:
    return XGrammarBackend(vocabulary)


def _require_plain(grammar: str) -> None:
    """Refuse grammars of other notations than GBNF's."""
    plain = _LITERAL.sub('""', grammar)
    if "::=" not in plain:
        raise refusal(
            "xgrammar reads grammars in GBNF's notation (root ::= …), not in Lark's",
            knows_other=True,
        )
    if (found := _EXTENSION.search(plain)) is not None:
        raise refusal(f"{found[0]!r} is not of GBNF's notation")


def _enforceable(form: object) -> object:
    """A format in xgrammar's own notation, with what xgrammar can enforce of its schemas."""
    match form:
        case list():
            return [_enforceable(each) for each in form]
        case JSONSchema(schema):
            return {
                "type": "json_schema",
                "json_schema": json.loads(enforceable(json.dumps(schema), is_lenient=False)),
                "max_whitespace_cnt": _MOST_WHITESPACE,
            }
        case Regex(pattern):
            return {"type": "regex", "pattern": whole(pattern)}
        case msgspec.Struct():
            names = (name for name in form.__struct_fields__ if name not in INERT_FIELDS)
            kind = type(form).__struct_config__.tag
            return {"type": kind, **{name: _enforceable(getattr(form, name)) for name in names}}
    return form
