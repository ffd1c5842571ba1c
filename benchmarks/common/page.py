"""Put what was measured between two marks of a page, <!-- NAME: begin --> and its end."""

from __future__ import annotations

from textwrap import wrap

LINE = 100


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def replace_between_marks(page: str, name: str, text: str) -> str:
    """The page with `text`, whole lines, in place of what stands between the marks.

    Raises:
        ValueError: the page does not have them.
    """
    begins, ends = marks(name)
    before, begin, rest = page.partition(begins)
    _, end, after = rest.partition(ends)
    if not begin or not end:
        raise ValueError(f"no {begins} … {ends} on the page to put the tables into")
    return f"{before}{begin}\n{text}{end}{after}"


def folded(text: str) -> str:
    """The text with its lines, but those of tables, as long as a document's may be."""
    lines = []
    for line in text.splitlines():
        indent = "  " if line.startswith("- ") else ""
        fits = not line or line.startswith("|")
        lines += (
            [line]
            if fits
            else wrap(
                line,
                LINE,
                subsequent_indent=indent,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    return "\n".join(lines) + "\n"
