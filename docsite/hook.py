"""What MkDocs builds beside docs/: the reference, and the documents of the repository's root.

Links are written for the repository. Here those to docs/ and to the root's documents lead to their
pages; those to other files of the repository become plain words, since the site has no such page.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

from mkdocs.structure.files import File, Files

from docsite.reference import PAGES

ROOT = Path(__file__).parents[1]
FROM_ROOT = {
    "README.md": "index.md",
    **{name: name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")},
}
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that do not lie in docs/."""
    for name, page in FROM_ROOT.items():
        text = for_the_site((ROOT / name).read_text(), "")
        files.append(File.generated(config, page, content=text))
    for name, write in PAGES.items():
        files.append(File.generated(config, name, content=write()))
    return files


def on_page_markdown(markdown: str, page: Any, **more: Any) -> str:
    if page.file.generated_by is not None:
        return markdown
    return for_the_site(markdown, "docs")


def for_the_site(markdown: str, folder: str) -> str:
    """The text of a document of that folder of the repository, with links as the site has them."""

    def link(match: re.Match[str]) -> str:
        words, target = match[1], match[2]
        if "://" in target or target.startswith("#"):
            return match[0]
        name, mark, anchor = target.partition("#")
        path = normpath(PurePosixPath(folder) / name)
        if path in FROM_ROOT:
            return f"[{words}]({FROM_ROOT[path]}{mark}{anchor})"
        if path.startswith("docs/"):
            return f"[{words}]({path.removeprefix('docs/')}{mark}{anchor})"
        return words

    return LINK.sub(link, markdown)
