"""Texts of strangers, made fit for a terminal or a log: nothing in them acts."""

from __future__ import annotations


def escaped(text: str, kept: str = "") -> str:
    """Write each character that would act instead of being shown as its escape.

    Controls, changes of direction and halves of pairs are such; spaces other than the plain one
    count as such, too.

    kept: characters that stay as they are, such as line breaks.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in kept else char.encode("unicode_escape").decode()
        for char in text
    )
