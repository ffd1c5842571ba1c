"""How findings about a checkpoint are worded, whatever the checkpoint holds.

A file's own words never enter a message unescaped or at full length. Knows nothing of formats.
"""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN_CHARACTERS = 120
_LISTED_NAMES = 4


def shown(value: object) -> str:
    """A value from a file, printable and short."""
    text = repr(value)
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"{text[:_SHOWN_CHARACTERS]}… ({len(text)} characters)"


def listed(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    text = ", ".join(shown(name) for name in names[:_LISTED_NAMES])
    more = len(names) - _LISTED_NAMES
    return f"{text} and {more} more" if more > 0 else text
