"""Anchors of headings as GitHub makes them, so that a link works in the repository and the site."""

from __future__ import annotations

import re
from collections.abc import Callable


def github_slug(heading: str) -> str:
    """The anchor of a heading, without what would tell it from an equal one."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def github_slugs() -> Callable[[str, str], str]:
    """What the toc extension asks for: a function of a heading's text and a separator."""
    return lambda heading, separator: github_slug(heading)
