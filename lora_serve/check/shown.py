"""What a server said, made fit for terminals and reports. Trusts no character of it."""

from __future__ import annotations

from lora_serve.observability.escapes import escaped

MOST_SHOWN = 400


def shown(text: object, limit: int = MOST_SHOWN) -> str:
    """`text` on one line, cut, with all that could steer a terminal written as escapes."""
    whole = str(text)
    line = escaped(whole[:limit])
    return f"{line}… ({len(whole):,} characters)" if len(whole) > limit else line
