"""Grammars by llguidance: JSON schemas, regular expressions, Lark's and GBNF's grammars."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import llguidance

from lora_serve.errors import InvalidRequestError
from lora_serve.structured_output.backend import Vocabulary, refusal
from lora_serve.structured_output.structural_tag import Structure, parse_structural_tag
from lora_serve.structured_outputs import StructuredOutput

# Between two tokens of JSON. Without a bound weak models write blanks until their max_tokens.
_WHITESPACE = r"[ \t\n\r]{1,32}"
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


class LLGuidanceGrammar:
    """Holds a matcher that has not begun; copies of it share what they find out of the grammar."""

    def __init__(self, fresh: llguidance.LLMatcher) -> None:
        self._fresh = fresh

    def matcher(self) -> LLGuidanceMatcher:
        return LLGuidanceMatcher(self._fresh.deep_copy())


class LLGuidanceBackend:
    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokenizer = llguidance.LLTokenizer(
            vocabulary.tokenizer_json, eos_token=list(vocabulary.eos_token_ids) or None
        )

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
                return _tag_grammar(text, self._is_special)

    def _is_special(self, text: str) -> bool:
        """Whether a text is one special token, which no other tokens make up."""
        token_ids = self._tokenizer.tokenize_str(text)
        return len(token_ids) == 1 and self._tokenizer.is_special_token(token_ids[0])


def load(vocabulary: Vocabulary) -> LLGuidanceBackend:
    return LLGuidanceBackend(vocabulary)


def _json_grammar(schema: str, *, is_lenient: bool) -> str:
    """is_lenient: leave out what cannot be enforced. The library takes objects alone."""
    schema = _ANYTHING if schema == "true" else schema
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(
            schema,
            defaults={"whitespace_pattern": _WHITESPACE},
            overrides={"lenient": is_lenient},
        )
    except ValueError as error:
        raise _refusal(str(error)) from error


def _notated_grammar(text: str) -> str:
    try:
        return llguidance.grammar_from("grammar", text)
    except ValueError as error:
        raise _refusal(str(error)) from error


def _tag_grammar(text: str, is_special: Callable[[str], bool]) -> str:
    """is_special: the library takes every <…> for a special token, or none of them.

    Raises:
        InvalidRequestError: it is no such tag, or some of its triggers <…> are special tokens.
    """
    given = parse_structural_tag(text)
    tags = [_tag(structure, given.triggers) for structure in given.structures]
    bracketed = {tag.trigger for tag in tags if tag.trigger[0] == "<" and tag.trigger[-1] == ">"}
    special = set(filter(is_special, bracketed))
    if special and special != bracketed:
        raise refusal(
            f"the trigger {min(special)} is a special token and {min(bracketed - special)} is none;"
            " shorten the latter by its last character"
        )
    try:
        grammar: str = llguidance.StructTag.to_grammar(tags, assume_special=bool(special))
    except AssertionError as error:
        raise refusal(f"the structural tag is not as it must be: {error}") from error
    return grammar


def _tag(structure: Structure, triggers: list[str]) -> llguidance.StructTag:
    if structure.schema is False:
        raise refusal(f"no text matches the schema false, behind {structure.begin[:80]!r}")
    schema = structure.schema
    return llguidance.StructTag(
        trigger=structure.trigger(triggers),
        begin=structure.begin,
        grammar=_ANYTHING if schema is True else json.dumps(schema, ensure_ascii=False),
        end=structure.end,
    )


def _require_sound(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise _refusal(matcher.get_error())


def _refusal(reason: str) -> InvalidRequestError:
    """The library's own reason, in words for users."""
    reason = reason.removesuffix("<non-verbose/>")
    return refusal("no answer can match it" if reason.startswith("NoExtension") else reason)
