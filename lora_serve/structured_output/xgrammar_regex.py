r"""Regular expressions as xgrammar reads them, without those that it reads as something else.

It passes over what it does not know (`a^b`, `\A`, `[[:alpha:]]`) and says so in its log alone, so
these are refused here. What it refuses itself is not looked for.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lora_serve.errors import InvalidRequestError
from lora_serve.structured_output.backend import refusal

_KNOWN_ESCAPES = "dDwWsSnrtfvxu"
_SURROGATE = re.compile(r"\\u\{?0*[dD][89a-fA-F][0-9a-fA-F]{2}")
_PART = re.compile(
    r"\\(?P<escaped>.)|(?P<set>\[\^?(?:\\.|[^\]\\])*\])|\((?P<group>\?)(?!:|<[A-Za-z_])"
    r"|(?P<anchor>[\^$])|(?P<dot>\.)|[()|]",
    re.DOTALL,
)
# Of which xgrammar would write the character itself into a string of JSON.
_NEEDS_ESCAPE = re.compile(r'"|[\x00-\x1f]|\\[\\nrtfvx]|\\u(?!0?[1-9a-fA-F])')
_SET_OPERATORS = re.compile(r"(?s)(?<!\\)(?:\\\\)*\[|&&|--|~~")


def whole(pattern: str) -> str:
    """An expression that matches the texts that the whole of `pattern` matches."""
    return _read(pattern).body


def found_in(pattern: str) -> str:
    """An expression of strings in JSON in which `pattern` is found, as schemas mean it."""
    if (found := _NEEDS_ESCAPE.search(pattern)) is not None:
        raise _unknown(f"{found[0]!r}, which strings of JSON escape,")
    read = _read(pattern)
    if read.has_branches and (read.is_at_start or read.is_at_end):
        raise _unknown("^ and $ beside |")
    start, end = "" if read.is_at_start else ".*", "" if read.is_at_end else ".*"
    return f"{start}(?:{read.body}){end}"


@dataclass(frozen=True, slots=True)
class _Read:
    """An expression without its anchors. has_branches: | divides all of it."""

    body: str
    is_at_start: bool
    is_at_end: bool
    has_branches: bool


def _read(pattern: str) -> _Read:
    """Translate the parts that xgrammar reads in another way.

    Raises:
        InvalidRequestError: there is a part that it would read as something else.
    """
    if _SURROGATE.search(pattern):
        raise _unknown("half a character (a surrogate)")
    body, last, depth, has_branches = "", 0, 0, False
    anchors: list[int] = []
    for match in _PART.finditer(pattern):
        body += pattern[last : match.start()] + _part(match)
        last = match.end()
        depth += {"(": 1, ")": -1}.get(match[0], 0)
        has_branches |= match[0] == "|" and depth == 0
        if match["anchor"]:
            anchors.append(match.start())
    is_at_start, is_at_end = 0 in anchors, len(pattern) - 1 in anchors and pattern[-1] == "$"
    if len(anchors) > is_at_start + is_at_end or pattern[:1] == "$" or pattern[-1:] == "^":
        raise _unknown("^ and $ elsewhere than around all of it")
    return _Read(body + pattern[last:], is_at_start, is_at_end, has_branches)


def _part(match: re.Match[str]) -> str:
    """What one part becomes."""
    text = match[0]
    if match["escaped"] is not None:
        _require_known(text)
    elif match["set"] is not None:
        for escape in re.findall(r"(?s)\\.", text):
            _require_known(escape)
        if _SET_OPERATORS.search(text[1:]):
            raise _unknown(f"{text[:40]!r}, a set within a set")
    elif match["group"] is not None:
        raise _unknown(f"{match.string[match.start() :][:10]!r}, a group with a special meaning")
    elif match["anchor"] is not None:
        return ""
    elif match["dot"] is not None:
        return r"[^\n]"
    return text


def _require_known(escape: str) -> None:
    letter = escape[1]
    if (letter.isalnum() and letter not in _KNOWN_ESCAPES) or not letter.isascii():
        raise _unknown(f"the escape {escape!r}")


def _unknown(what: str) -> InvalidRequestError:
    return refusal(f"xgrammar does not know {what} in a regular expression", knows_other=True)
