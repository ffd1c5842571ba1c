"""The page in a real browser, before a real server under load."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator

import httpx
import pytest
from playwright.sync_api import Browser, expect

from lora_serve.demo.client import Client
from lora_serve.demo.corpus import ALPHA_LABEL, BETA_LABEL, LABEL_REQUEST
from lora_serve.demo.model import DemoPaths
from lora_serve.demo.server_process import ServerProcess
from tests.fakes.browser import PATIENCE_MS, chromium, visiting

LONG_ID = "long-request"
LONG = {"prompt": "Once", "max_tokens": 8000, "temperature": 1, "ignore_eos": True, "stream": True}

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def await_abort(server: ServerProcess) -> Iterator[Callable[[], None]]:
    """A long answer is under way until one is aborted, which this awaits.

    A browser may take longer for its part than one answer lasts, so they follow each other.
    """
    ends: list[str] = []
    has_begun = threading.Event()

    def ask() -> None:
        while ends != ["abort"]:
            ends.clear()
            headers = {"X-Request-Id": LONG_ID}
            url = f"{server.base_url}/v1/completions"
            with httpx.stream("POST", url, json=LONG, headers=headers, timeout=120) as answer:
                for line in answer.iter_lines():
                    has_begun.set()
                    if line.startswith("data: {"):
                        for choice in json.loads(line.removeprefix("data: "))["choices"]:
                            ends.extend(filter(None, [choice["finish_reason"]]))

    thread = threading.Thread(target=ask)
    thread.start()
    assert has_begun.wait(60)

    def await_abort() -> None:
        thread.join(60)
        assert ends == ["abort"]

    yield await_abort
    body = {"request_ids": [LONG_ID]}
    httpx.post(f"{server.base_url}/abort_requests", json=body).raise_for_status()
    thread.join(60)


def test_charts_move_under_load_and_a_request_is_aborted_by_hand(
    browser: Browser, server: ServerProcess, await_abort: Callable[[], None]
) -> None:
    with visiting(browser, server.base_url) as page:
        tokens = page.locator(".chart").filter(has_text="Tokens per second")
        line = tokens.locator(".plot path.line-0")
        expect(line).to_have_attribute("d", re.compile("L.*L"))  # three points at least
        generated = float(tokens.locator("strong").first.inner_text().replace(",", ""))
        assert generated > 0
        intervals = page.locator(".chart").filter(has_text="Time between tokens")
        expect(intervals.locator("strong").first).to_contain_text("ms")
        page.get_by_role("link", name="Requests").click()
        row = page.locator("#request-table tbody tr").filter(has_text=LONG_ID)
        expect(row).to_contain_text("running")
        expect(row).to_contain_text("/v1/completions")
        row.get_by_role("button", name="Abort").click()
        page.get_by_role("dialog").get_by_role("button", name="Abort").click()
        expect(page.locator("#status")).to_have_text(f"{LONG_ID} was aborted.")
        expect(row).to_have_count(0)
        await_abort()


def test_a_replaced_adapter_answers_anew_and_a_roll_back_brings_the_old_answers(
    browser: Browser, server: ServerProcess, client: Client, demo_paths: DemoPaths
) -> None:
    client.load_adapter("page-a", demo_paths.alpha)
    client.load_adapter("page-b", demo_paths.beta)
    with visiting(browser, server.base_url, "#playground") as page:
        left, right = page.get_by_label("Model or adapter").all()
        difference = page.locator("#difference")
        answers = page.locator(".answer")
        expect(left).not_to_have_value("")

        def ask() -> list[str]:
            page.get_by_role("link", name="Playground").click()
            left.fill("page-a")
            right.fill("page-b")
            page.get_by_label("Prompt").fill(LABEL_REQUEST)
            page.keyboard.press("Control+Enter")
            expect(page.get_by_role("button", name="Stop")).to_be_disabled()
            return answers.all_inner_texts()

        def change(button: str, told: str) -> None:
            page.get_by_role("link", name="Adapters").click()
            page.get_by_role("button", name="Manage page-a").click()
            page.get_by_label("Replace in place by").fill(str(demo_paths.beta))
            page.get_by_role("button", name=button).click()
            expect(page.locator("#status")).to_contain_text(f"page-a was {told}")
            page.keyboard.press("Escape")

        assert ask() == [ALPHA_LABEL, BETA_LABEL]
        expect(difference).to_contain_text("differ from character 1 on")
        change("Replace", "loaded")
        assert ask() == [BETA_LABEL, BETA_LABEL]
        expect(difference).to_have_text("The answers are equal.")
        change("Roll back", "rolled back")
        assert ask() == [ALPHA_LABEL, BETA_LABEL]
    for name in ("page-a", "page-b"):
        client.unload_adapter(name)
