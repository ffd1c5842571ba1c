"""A real headless Chromium, and what every visit to the page must keep to."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

EXECUTABLES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
PATIENCE_MS = 20_000  # for what the page does by itself, on a machine that is busy
REFUSED = "Failed to load resource: the server responded with a status of 4"


@contextmanager
def chromium() -> Iterator[Browser]:
    """End it before asynchronous tests run: Playwright has an event loop of its own meanwhile."""
    executable = next(filter(None, map(shutil.which, EXECUTABLES)), None)
    if executable is None:
        pytest.skip("NO CHROMIUM: the page is not tested in a browser; apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=list(FLAGS))
        yield browser
        browser.close()


@contextmanager
def visiting(
    browser: Browser, base_url: str, view: str = "", path: str = "/ui", **context: Any
) -> Iterator[Page]:
    """The page in a tab of its own; at the end it must have kept to its server and be at peace.

    view: which to open of the page at `path`. context: of Playwright's `new_context`. Refusals by
    the server (4xx) are noted on the console by the browser itself, and are no fault.
    """
    requested: list[str] = []
    faults: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning") and not message.text.startswith(REFUSED):
            faults.append(message.text)

    tab = browser.new_context(**context)
    page = tab.new_page()
    page.set_default_timeout(PATIENCE_MS)
    page.on("request", lambda request: requested.append(request.url))
    page.on("console", note)
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(f"{base_url}{path}{view}")
    yield page
    tab.close()
    assert faults == []
    assert [url for url in requested if not url.startswith(f"{base_url}/")] == []
