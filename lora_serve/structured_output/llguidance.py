"""Grammars by llguidance: JSON schemas, regular expressions, Lark's and GBNF's grammars."""

from __future__ import annotations

import json
from typing import Any

import llguidance

from lora_serve.errors import InvalidRequestError
from lora_serve.structured_output.backend import Vocabulary, refusal
from lora_serve.structured_output.structural_tag import parse_structural_tag
from lora_serve.structured_output.tag_grammar import grammar_of
from lora_serve.structured_outputs import StructuredOutput

# Between two tokens of JSON. Without a bound weak models write blanks until their max_tokens.
_DEFAULTS: Any = {"whitespace_pattern": r"[ \t\n\r]{1,32}"}
# What one mask, or one automaton, may come to; beyond it the request is refused.
_ANYTHING = "{}"  # as a schema
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


class LLGuidanceMatcher:
    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    @property
    def is_finished(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def bitmask(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        _require_sound(self._matcher)
        return mask

    def accept(self, token_id: int) -> None:
        self._matcher.consume_token(token_id)
        _require_sound(self._matcher)

    def fork(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._matcher.deep_copy())


class LLGuidanceGrammar:
    """Holds a matcher that has not begun; copies of it share what they find out of the grammar."""

    def __init__(self, fresh: llguidance.LLMatcher) -> None:
        self._fresh = fresh

    def matcher(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._fresh.deep_copy())


class LLGuidanceBackend:
    def __init__(self, vocabulary: Vocabulary) -> None:
        # Logits may have more rows than the tokenizer knows tokens; llguidance refuses those.
        known = [i for i in vocabulary.eos_token_ids if vocabulary.token_bytes(i)]
        self._tokenizer = llguidance.LLTokenizer(vocabulary.tokenizer_json, eos_token=known or None)

    def compile(self, constraint: StructuredOutput) -> LLGuidanceGrammar:
        matcher = llguidance.LLMatcher(
            self._tokenizer,
            self._grammar(constraint),
            log_level=0,
            limits=llguidance.LLParserLimits(**_LIMITS),
        )
        _require_sound(matcher)
        return LLGuidanceGrammar(matcher)

    def _grammar(self, constraint: StructuredOutput) -> str:
        """The constraint in llguidance's own notation, not checked yet."""
        text = constraint.text
        match constraint.kind:
            case "json":
                return _json_grammar(text, is_lenient=not constraint.is_strict)
            case "json_object":
                return _json_grammar('{"type":"object"}', is_lenient=False)
            case "regex":
                return llguidance.LLMatcher.grammar_from_regex(text)
            case "choice":
                choices = (json.dumps(each, ensure_ascii=False) for each in json.loads(text))
                return llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(choices))
            case "grammar":
                return _notated_grammar(text)
            case "structural_tag":
                tag = parse_structural_tag(text)
                return grammar_of(tag, self._special_id, {**_DEFAULTS, "lenient": False})

    def _special_id(self, text: str) -> int | None:
        """The id of a text that is one special token, which no other tokens make up."""
        token_ids = self._tokenizer.tokenize_str(text)
        is_special = len(token_ids) == 1 and self._tokenizer.is_special_token(token_ids[0])
        return token_ids[0] if is_special else None


def load(vocabulary: Vocabulary) -> LLGuidanceBackend:
    return LLGuidanceBackend(vocabulary)


def _json_grammar(schema: str, *, is_lenient: bool) -> str:
    """is_lenient: leave out what cannot be enforced. The library takes objects alone."""
    schema = _ANYTHING if schema == "true" else schema
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(
            schema,
            defaults=_DEFAULTS,
            overrides={"lenient": is_lenient},
        )
    except ValueError as error:
        raise _refusal(str(error)) from error


def _notated_grammar(text: str) -> str:
    try:
        return llguidance.grammar_from("grammar", text)
    except ValueError as error:
        raise _refusal(str(error)) from error


def _require_sound(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise _refusal(matcher.get_error())


def _refusal(reason: str) -> InvalidRequestError:
    """The library's own reason, in words for users."""
    reason = reason.removesuffix("<non-verbose/>")
    return refusal("no answer can match it" if reason.startswith("NoExtension") else reason)
