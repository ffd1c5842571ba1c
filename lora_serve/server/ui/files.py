"""Which files the page is made of. They are served as they lie in the package's `static` folder."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePosixPath

UI_PATH = "/ui"
PAGE = "index.html"

MEDIA_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class UIFile:
    """One file beside the page itself."""

    name: str

    @property
    def path(self) -> str:
        return f"{UI_PATH}/{self.name}"

    @property
    def media_type(self) -> str:
        return MEDIA_TYPES[PurePosixPath(self.name).suffix]

    def read(self) -> bytes:
        return (files(__package__) / "static" / self.name).read_bytes()


UI_FILES = tuple(
    UIFile(name)
    for name in (
        "style.css",
        "icon.svg",
        "app.js",
        "api.js",
        "session.js",
        "dom.js",
        "format.js",
        "poll.js",
        "metrics.js",
        "history.js",
        "chart.js",
        "overview.js",
        "tiers.js",
        "adapters.js",
        "adapter_dialog.js",
        "changes.js",
        "requests.js",
        "playground.js",
        "answer.js",
        "difference.js",
    )
)
