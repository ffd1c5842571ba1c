"""What a server said, made fit for terminals and reports. Trusts no character of it."""

from __future__ import annotations

MOST_SHOWN = 400


def shown(text: object, limit: int = MOST_SHOWN) -> str:
    """`text` on one line, cut, with all that could steer a terminal written as escapes."""
    whole = str(text)
    escaped = "".join(char if _is_harmless(char) else _escape(char) for char in whole[:limit])
    return f"{escaped}… ({len(whole):,} characters)" if len(whole) > limit else escaped


def _is_harmless(char: str) -> bool:
    """Printable: no control, no change of direction, no half of a pair."""
    return char.isprintable()


def _escape(char: str) -> str:
    return char.encode("unicode_escape", "backslashreplace").decode("ascii")
