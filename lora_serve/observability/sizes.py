"""Numbers of bytes and of other things as people read them."""

from __future__ import annotations

_UNITS = ("KiB", "MiB", "GiB", "TiB")


def shown_bytes(count: int) -> str:
    """Such as "942 MiB" or "1.5 GiB"; "0 bytes" to "1023 bytes" below."""
    if count < 2**10:
        return f"{count} bytes"
    size, unit = count / 2**10, 0
    while size >= 1023.5 and unit + 1 < len(_UNITS):
        size /= 2**10
        unit += 1
    return f"{size:.1f} {_UNITS[unit]}" if size < 9.95 else f"{size:.0f} {_UNITS[unit]}"


def shown_count(count: int) -> str:
    """Such as "135 M" or "7.6 G", and with commas below a million."""
    for size, letter in ((10**9, "G"), (10**6, "M")):
        if count >= size:
            return (
                f"{count / size:.1f} {letter}"
                if count < 10 * size
                else f"{count / size:.0f} {letter}"
            )
    return f"{count:,}"
