"""A table of text, for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def text_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], words: Collection[int] = (0,)
) -> str:
    """Align the columns in `words` to the left, the others to the right."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in words else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
