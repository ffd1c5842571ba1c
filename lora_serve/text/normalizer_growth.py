"""Refuses a tokenizer whose normalizer writes much more than it is given.

A request's length is bounded before it is tokenized; a rule that replaces each character by ten
thousand would undo that. Unicode's own forms write at most 18 characters for one, and are let pass.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping

import regex
from tokenizers import Tokenizer

from lora_serve.errors import ConfigError

MAX_GROWTH = 64  # of a text; SentencePiece's own rules write up to 33 bytes for a character
_TRIE_SIZE_BYTES = 4
_ANCHORS = re.compile(r"[\^$]|\\[bBAzZGKyY]|\(\?")  # what may match at a place, and takes nothing


def check_growth(tokenizer: Tokenizer, source: str) -> None:
    """Raise a ConfigError if a text of `source`'s tokenizer may grow beyond MAX_GROWTH times."""
    if tokenizer.normalizer is None:
        return
    growth = 1
    for rule in _rules(json.loads(tokenizer.normalizer.__getstate__())):
        growth *= _growth(rule)
        if growth > MAX_GROWTH:
            raise ConfigError(
                f"the tokenizer of {source}: its normalizer ({rule['type']}) may make a text "
                f"{growth:,} times as long, above {MAX_GROWTH}; no model's does: take the model's "
                "own tokenizer.json, or name another place with --tokenizer"
            )


def _rules(rule: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    parts = rule.get("normalizers")
    if isinstance(parts, list):
        for part in parts:
            yield from _rules(part)
    else:
        yield rule


def _growth(rule: Mapping[str, object]) -> int:
    """Most characters that a rule writes for one that it reads."""
    match rule:
        case {"type": "Replace", "pattern": {"String": str(text)}, "content": str(content)}:
            return -(-len(content) // len(text)) or 1 if text else len(content) + 1
        case {"type": "Replace", "pattern": {"Regex": str(pattern)}, "content": str(content)}:
            return max(1, len(content) + _may_match_nothing(pattern))
        case {"type": "Prepend", "prepend": str(text)}:  # to each part between added tokens
            return len(text) + 1
        case {"type": "Precompiled", "precompiled_charsmap": str(encoded)}:
            rules = base64.b64decode(encoded)
            begin = _TRIE_SIZE_BYTES + int.from_bytes(rules[:_TRIE_SIZE_BYTES], "little")
            return max(1, *map(len, rules[begin:].split(b"\0")))
    return 1


def _may_match_nothing(pattern: str) -> bool:
    """Whether a match may be empty, and so add to a text; assumed where that is hard to tell."""
    if _ANCHORS.search(pattern):
        return True
    try:
        return regex.match(pattern, "", timeout=1.0) is not None
    except (regex.error, TimeoutError):
        return True
