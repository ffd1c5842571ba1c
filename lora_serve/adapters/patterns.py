"""Which modules a key of `rank_pattern` or `alpha_pattern` means, as PEFT reads it.

A key is a regular expression that must match a module's whole name, or what follows one of its
dots; the first key in the file's order wins. Matching an expression can take exponential time, and
Python's matcher holds the interpreter meanwhile. So only the syntax that module names need is
accepted, and at most `_MAX_WAYS` ways through a name. Compiling takes time for each character, so
the number of keys and their lengths are checked before any is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from lora_serve.adapters.findings import shown

T = TypeVar("T")

_MAX_KEYS = 2048  # a hundred layers have about 700 projections; compiled in half a second
_MAX_CHARACTERS = 1000
_MAX_ALL_CHARACTERS = 128 * _MAX_KEYS
_MAX_WAYS = 2**20
_MAX_WAYS_OF_ALL = _MAX_WAYS * 1024  # through the names of all modules, experts among them
_NAME_CHARACTERS = 64  # about the longest name of a projection

_TOKEN = re.compile(
    r"""
    (?P<atom> [\w.^$/:-] | \\[.dDwW/_-] | \[ \^? (?: \w-\w | [\w.] )+ \] )
  | (?P<open> \( (?: \?: )? )
  | (?P<close> \) )
  | (?P<either> \| )
  | (?P<optional> \? )
  | (?P<repeat> [*+] | \{ \d{1,3} (?: ,\d{0,3} )? \} )
    """,
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class ModulePatterns(Generic[T]):
    """A value for the modules that each pattern means. num_ways: at most, through one name."""

    patterns: tuple[tuple[re.Pattern[str], T], ...] = ()
    num_ways: int = 0

    def can_match(self, num_modules: int) -> bool:
        """Whether so many names can be matched in seconds."""
        return self.num_ways * num_modules <= _MAX_WAYS_OF_ALL

    def get(self, module: str, default: T) -> T:
        for pattern, value in self.patterns:
            if pattern.match(module):
                return value
        return default


def compile_patterns(
    setting: str, values: Mapping[str, T], findings: list[str]
) -> ModulePatterns[T]:
    """The patterns of one setting; those that cannot be matched safely become findings."""
    excess = _excess(values)
    if excess is not None:
        findings.append(f"{setting}: {excess}; let one pattern stand for many modules")
        return ModulePatterns()
    patterns = []
    num_ways = 0
    for key, value in values.items():
        pattern = _compile(key)
        if pattern is None:
            findings.append(f"{setting}: {shown(key)} is not a pattern of module names")
            continue
        num_ways += _count_ways(key)
        patterns.append((pattern, value))
    if num_ways > _MAX_WAYS:
        findings.append(f"{setting}: its patterns are too complex to match; write out module names")
        return ModulePatterns()
    return ModulePatterns(tuple(patterns), num_ways)


def _excess(keys: Collection[str]) -> str | None:
    """What is too much of all keys together."""
    if len(keys) > _MAX_KEYS:
        return f"{len(keys)} keys are more than {_MAX_KEYS}"
    num_characters = sum(map(len, keys))
    if num_characters > _MAX_ALL_CHARACTERS:
        return f"keys of {num_characters} characters are longer than {_MAX_ALL_CHARACTERS}"
    return None


def _compile(key: str) -> re.Pattern[str] | None:
    if len(key) > _MAX_CHARACTERS or _TOKEN.sub("", key):
        return None
    if re.search(r"\)[*+{]", key):  # a repeated group can take exponential time
        return None
    try:
        re.compile(key)  # compiled alone, too: ")|(" is valid only between the parentheses below
        return re.compile(rf"(.*\.)?({key})$")
    except (re.error, RecursionError):
        return None


def _count_ways(key: str) -> int:
    """An upper bound for the ways in which a matcher tries `key` on one name."""
    num_repeats = 1  # the one before the key, in _compile
    ways = _NAME_CHARACTERS
    branches = [1]
    for token in _TOKEN.finditer(key):
        match token.lastgroup:
            case "repeat":
                num_repeats += 1
                ways *= max(2, _NAME_CHARACTERS // num_repeats)
            case "optional":
                ways *= 2
            case "open":
                branches.append(1)
            case "either":
                branches[-1] += 1
            case "close":
                ways *= branches.pop()
    return ways * branches[0]
