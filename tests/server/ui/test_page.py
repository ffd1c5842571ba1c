"""The page in a real browser, before an engine without a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from playwright.sync_api import Browser, Locator, Page, expect

from lora_serve.config import ServerConfig
from tests.fakes.browser import PATIENCE_MS, visiting
from tests.fakes.engine import write_adapter
from tests.server.ui.conftest import Site, served

KEYS = ServerConfig(api_key=("user-key",), admin_api_key=("root-key",))
HOSTILE = '<img src=x onerror="window.hacked=1"></td><script>hacked=1</script>\'"&amp;'
VIEWS = ("overview", "adapters", "requests", "playground")
FAINT = """elements => {
  const channels = color => color.match(/[\\d.]+/g).slice(0, 3).map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const light = color => channels(color)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = element => {
    let behind = element;
    while (/, 0\\)$/.test(getComputedStyle(behind).backgroundColor)) behind = behind.parentElement;
    const pair = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor]
      .map(light).sort((one, other) => one - other);
    return (pair[1] + 0.05) / (pair[0] + 0.05);
  };
  return elements.filter(e => e.checkVisibility() && contrast(e) < 4.5).map(e => e.textContent);
}"""

expect.set_options(timeout=PATIENCE_MS)


def use_key(page: Page, key: str) -> None:
    page.get_by_label("Key", exact=True).fill(key)
    page.get_by_role("button", name="Use this key").click()


def row(page: Page, name: str) -> Locator:
    return page.locator("#adapter-table tbody tr").filter(
        has=page.get_by_role("rowheader", name=name, exact=True)
    )


def manage(page: Page, name: str) -> Locator:
    page.get_by_role("button", name=f"Manage {name}", exact=True).click()
    return page.locator("#adapter-dialog")


def test_keys_decide_what_is_shown(browser: Browser, tmp_path: Path) -> None:
    with served(KEYS) as site, visiting(browser, site.url) as page:
        site.load("secretive", write_adapter(tmp_path / "a", "A"))
        expect(page.locator("#state")).to_contain_text("Key needed")
        expect(page.get_by_role("heading", name="Overview")).to_be_hidden()
        use_key(page, "wrong-key")
        expect(page.locator("#key-error")).to_contain_text("unknown API key")
        use_key(page, "user-key")
        expect(page.locator("#why-no-metrics")).to_contain_text("needs an admin API key")
        expect(page.locator("#load")).to_have_text("0")
        assert page.locator("#figures").is_hidden()
        page.get_by_role("link", name="Adapters").click()
        expect(page.get_by_role("button", name="Details secretive")).to_be_visible()
        assert page.get_by_role("button", name="Load adapter").is_hidden()
        assert str(tmp_path) not in page.content()
        page.get_by_role("button", name="Details secretive").click()
        expect(page.locator("#adapter-dialog")).to_contain_text("Digest")
        for name in ("Replace", "Roll back", "Unload", "Reset prefix cache"):
            assert page.get_by_role("button", name=name, exact=True).is_hidden()
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Key", exact=True).click()
        use_key(page, "root-key")
        expect(page.get_by_role("button", name="Load adapter")).to_be_visible()
        assert page.evaluate("Object.values(sessionStorage)") == ["root-key"]
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        assert "key" not in page.url
        page.reload()
        expect(page.locator("#caller")).to_contain_text("admin key 1")


def test_an_admin_loads_replaces_rolls_back_and_unloads(
    browser: Browser, site: Site, tmp_path: Path
) -> None:
    a, b = (write_adapter(tmp_path / name, name.upper()) for name in ("a", "b"))
    with visiting(browser, site.url, "#adapters") as page:
        expect(page.locator("#no-adapters")).to_have_text("No adapter is loaded.")
        page.get_by_role("button", name="Load adapter").click()
        page.get_by_label("Name", exact=True).fill("tenant")
        page.get_by_label("Directory on the server, or hub id").fill("/nowhere")
        page.get_by_role("button", name="Load", exact=True).click()
        expect(page.locator("#load-error")).to_contain_text("Loading lora tenant failed")
        page.get_by_label("Directory on the server, or hub id").fill(a)
        page.get_by_role("button", name="Load", exact=True).click()
        expect(page.locator("#status")).to_have_text(f"tenant was loaded from {a}.")
        expect(row(page, "tenant")).to_contain_text(a)
        dialog = manage(page, "tenant")
        assert page.get_by_role("button", name="Roll back").is_hidden()
        dialog.get_by_label("Replace in place by").fill(b)
        dialog.get_by_role("button", name="Replace").click()
        expect(dialog.locator("#adapter-facts")).to_contain_text(b)
        expect(dialog.locator("#adapter-changes li")).to_have_count(3)
        expect(dialog.locator("#adapter-changes")).to_contain_text("load failed: Loading lora")
        expect(dialog.get_by_label("Earlier version")).to_contain_text(f"from {a}")
        dialog.get_by_role("button", name="Roll back").click()
        expect(dialog.locator("#adapter-facts")).to_contain_text(a)
        expect(page.locator("#status")).to_contain_text("tenant was rolled back to")
        write_adapter(tmp_path / "b", "other weights")
        dialog.get_by_role("button", name="Roll back").click()
        expect(dialog.locator("#adapter-error")).to_contain_text("holds other weights by now")
        dialog.get_by_role("button", name="Unload").click()
        page.get_by_role("button", name="Cancel").click()
        assert "tenant" in site.engine._adapters
        dialog.get_by_role("button", name="Unload").click()
        page.locator("dialog.confirm").get_by_role("button", name="Unload").click()
        expect(dialog).to_be_hidden()
        expect(row(page, "tenant")).to_have_count(0)
        assert site.engine._adapters == {}
        page.locator("#all-changes summary").click()
        page.get_by_role("button", name="Load tenant again").click()
        page.get_by_role("button", name="Load", exact=True).click()
        expect(row(page, "tenant")).to_contain_text(b)
        expect(page.get_by_role("button", name="Load tenant again")).to_have_count(0)


def test_a_reset_is_asked_for_twice(browser: Browser, site: Site, tmp_path: Path) -> None:
    site.load("tenant", write_adapter(tmp_path, "A"))
    with visiting(browser, site.url, "#adapters") as page:
        page.get_by_role("button", name="Reset prefix cache", exact=True).click()
        page.get_by_role("button", name="Cancel").click()
        assert site.engine.resets == []
        dialog = manage(page, "tenant")
        dialog.get_by_role("button", name="Reset prefix cache").click()
        page.get_by_role("button", name="Reset", exact=True).click()
        expect(page.locator("#status")).to_contain_text("The prefix cache of tenant was reset.")
        assert site.engine.resets == ["tenant"]


def test_names_and_answers_that_look_like_markup_are_text(
    browser: Browser, site: Site, tmp_path: Path
) -> None:
    site.load(HOSTILE, write_adapter(tmp_path, HOSTILE))
    with visiting(browser, site.url, "#adapters") as page:
        expect(row(page, HOSTILE)).to_be_visible()
        dialog = manage(page, HOSTILE)
        expect(dialog.get_by_role("heading", name=HOSTILE)).to_be_visible()
        page.keyboard.press("Escape")
        page.get_by_role("link", name="Playground").click()
        expect(page.get_by_label("Model or adapter").first).to_have_value(HOSTILE)
        page.get_by_label("Prompt").fill(HOSTILE)
        page.get_by_role("button", name="Ask both").click()
        expect(page.locator("#answer-left .answer")).to_contain_text(f"{HOSTILE}: You said:")
        assert page.locator("img").count() == 1  # the page's own sign
        assert page.locator("script").count() == 1
        assert page.evaluate("window.hacked") is None


def test_the_policy_stops_markup_and_foreign_requests(browser: Browser, site: Site) -> None:
    page = browser.new_page()  # what is tried here is told on the console
    page.goto(f"{site.url}/ui")
    told = page.evaluate("""async () => {
        const told = [];
        try { document.body.innerHTML = "<b>x</b>"; } catch (e) { told.push(e.name); }
        try { await fetch("https://example.org/"); } catch (e) { told.push(e.name); }
        return told;
    }""")
    assert told == ["TypeError", "TypeError"]
    page.close()


def test_five_thousand_adapters_stay_usable(browser: Browser, site: Site, tmp_path: Path) -> None:
    site.load("a", write_adapter(tmp_path, "A"))
    one = site.engine._adapters.pop("a")
    names = [f"tenant-{number}" for number in range(5000)]
    site.engine._adapters = {
        name: replace(one, name=name, num_leases=number) for number, name in enumerate(names)
    }
    with visiting(browser, site.url, "#adapters") as page:
        count, rows = page.locator("#adapter-count"), page.locator("#adapter-table tbody tr")
        expect(count).to_have_text("1–50 of 5,000 adapters")
        expect(rows).to_have_count(50)
        expect(rows.first).to_contain_text("tenant-0")
        page.get_by_role("button", name="Next").click()
        expect(count).to_have_text("51–100 of 5,000 adapters")
        expect(rows.first).to_contain_text("tenant-50")
        page.get_by_role("button", name="In use by").click()
        page.get_by_role("button", name="In use by").click()
        expect(page.get_by_role("columnheader", name="In use by")).to_have_attribute(
            "aria-sort", "descending"
        )
        expect(rows.first).to_contain_text("tenant-4999")
        page.get_by_label("Search").fill("T-123")
        expect(count).to_have_text("1–11 of 11 adapters")
        page.get_by_label("Search").fill("nobody")
        expect(page.locator("#no-adapters")).to_have_text("No adapter matches.")


def test_two_answers_come_side_by_side_and_are_marked_where_they_differ(
    browser: Browser, site: Site, tmp_path: Path
) -> None:
    site.load("one", write_adapter(tmp_path / "a", "ALPHA"))
    site.load("two", write_adapter(tmp_path / "b", "ALPHONSE"))
    with visiting(browser, site.url, "#playground") as page:
        left, right = page.get_by_label("Model or adapter").all()
        expect(left).to_have_value("one")
        expect(right).to_have_value("two")
        page.get_by_label("Prompt").fill("Hello there, this is long enough for a block.")
        page.keyboard.press("Control+Enter")
        difference, answers = page.locator("#difference"), page.locator(".answer")
        expect(difference).to_have_text("The answers differ from character 5 on.")
        expect(answers.first.locator("mark")).to_contain_text("A: You said: ")
        expect(answers.last.locator("mark")).to_contain_text("ONSE: You said: ")
        for side in ("left", "right"):
            stats = page.locator(f"#answer-{side} .stats")
            expect(stats).to_contain_text("Ended bystop")
            expect(stats).to_contain_text("-g0")
        stop = page.get_by_role("button", name="Stop")
        expect(stop).to_be_disabled()  # until both streams are closed nothing else is asked
        right.fill("one")
        page.keyboard.press("Control+Enter")
        expect(difference).to_have_text("The answers are equal.")
        expect(page.locator("mark").filter(has_text="You")).to_have_count(0)
        cached = page.locator("#answer-left .stats div").filter(has_text="Cached").locator("dd")
        assert int(cached.inner_text()) > 0
        right.fill("nobody")
        page.keyboard.press("Control+Enter")
        expect(page.locator("#answer-right .error")).to_contain_text("`nobody` does not exist")


def test_answers_are_stopped(browser: Browser, site: Site) -> None:
    with visiting(browser, site.url, "#playground") as page:
        expect(page.get_by_label("Model or adapter").last).not_to_have_value("")
        page.get_by_label("Prompt").fill("Hello")
        stop = page.get_by_role("button", name="Stop")
        for end in (stop.click, lambda: page.keyboard.press("Escape")):
            site.open_gate(False)
            page.get_by_label("Prompt").focus()
            page.keyboard.press("Control+Enter")
            expect(stop).to_be_enabled()
            end()
            expect(stop).to_be_disabled()
            expect(page.locator("#answer-left .stats")).to_contain_text("stopped here")
            site.open_gate(True)


def test_requests_in_flight_are_listed_without_what_they_ask(browser: Browser, site: Site) -> None:
    site.open_gate(False)
    with visiting(browser, site.url, "#playground") as page:
        expect(page.get_by_label("Model or adapter").last).not_to_have_value("")
        page.get_by_label("Prompt").fill("a prompt that is not shown")
        page.keyboard.press("Control+Enter")
        expect(page.get_by_role("button", name="Stop")).to_be_enabled()  # both are on their way
        page.get_by_role("link", name="Requests").click()
        expect(page.locator("#request-count")).to_have_text("2 in flight.")
        rows = page.locator("#request-table tbody tr")
        expect(rows).to_have_count(2)
        expect(rows.first).to_contain_text("/v1/chat/completions")
        assert "is not shown" not in page.locator("#requests").inner_text()
        rows.first.get_by_role("button", name="Abort").click()
        page.get_by_role("dialog").get_by_role("button", name="Abort").click()
        expect(page.locator("#status")).to_contain_text("was aborted.")
        site.open_gate(True)
        expect(page.locator("#request-count")).to_have_text("0 in flight.")


def test_all_of_it_is_reached_by_keyboard(browser: Browser, site: Site, tmp_path: Path) -> None:
    site.load("tenant", write_adapter(tmp_path, "A"))
    focused = "document.activeElement"
    with visiting(browser, site.url) as page:
        expect(page.locator(".chart .frame").first).to_be_visible()
        for name in ("Overview", "Adapters"):
            page.keyboard.press("Tab")
            assert page.evaluate(f"{focused}.textContent") == name
            assert page.evaluate(f"getComputedStyle({focused}).outlineStyle") == "solid"
        page.keyboard.press("Enter")
        expect(row(page, "tenant")).to_be_visible()
        for _ in range(30):
            page.keyboard.press("Tab")
            if page.evaluate(f"{focused}.getAttribute('aria-label')") == "Manage tenant":
                break
        page.keyboard.press("Enter")
        expect(page.locator("#adapter-dialog")).to_be_visible()
        for _ in range(12):
            page.keyboard.press("Tab")
            inside = f"{focused} === document.body || {focused}.closest('dialog') !== null"
            assert page.evaluate(inside)
        page.keyboard.press("Escape")
        expect(page.locator("#adapter-dialog")).to_be_hidden()
        page.wait_for_timeout(2500)  # the table is drawn anew, and the focus stays
        assert page.evaluate(f"{focused}.getAttribute('aria-label')") == "Manage tenant"
        page.get_by_role("link", name="Overview").click()
        chart = page.locator(".chart .frame").first
        expect(page.locator("#charts strong").first).not_to_have_text("–")
        chart.focus()
        page.keyboard.press("ArrowLeft")
        expect(chart.locator(".tooltip")).to_contain_text("generated")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_is_legible(
    browser: Browser, site: Site, tmp_path: Path, scheme: str
) -> None:
    site.load("tenant-" + "x" * 200, write_adapter(tmp_path, "A"))
    phone = {"viewport": {"width": 360, "height": 740}, "color_scheme": scheme}
    with visiting(browser, site.url, **phone) as page:
        for view in VIEWS:
            page.locator(f"#to-{view}").click()
            expect(page.locator(f"#{view} h1")).to_be_visible()
            if view == "adapters":
                expect(page.locator("#adapter-table tbody tr")).to_have_count(1)
            assert page.evaluate("document.documentElement.scrollWidth") <= 360, view
            texts = f"#{view} :is(h1, p, label, button:enabled, dt, legend, td, th)"
            assert page.eval_on_selector_all(texts, FAINT) == [], view
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(14, 18, 22)") is (scheme == "dark")


def test_every_field_has_a_label(browser: Browser, site: Site) -> None:
    with visiting(browser, site.url) as page:
        unlabelled = "[...document.querySelectorAll('input, select, textarea')]"
        assert page.evaluate(f"{unlabelled}.filter(e => !e.labels.length).map(e => e.id)") == []
        unnamed = "[...document.querySelectorAll('button')].filter(e => !e.textContent.trim())"
        assert page.evaluate(f"{unnamed}.length") == 0


def test_it_says_that_the_server_does_not_answer_and_goes_on_when_it_does(
    browser: Browser, site: Site
) -> None:
    page = browser.new_page()  # a server that is away is told on the console
    page.goto(f"{site.url}/ui")
    state = page.locator("#state")
    expect(state).to_contain_text("Answering")
    page.route("**/*", lambda route: route.abort())  # set_offline spares loopback in some builds
    expect(state).to_contain_text("Not answering")
    page.unroute("**/*")
    expect(state).to_contain_text("Answering")
    page.close()


def test_the_api_is_shown_at_docs_with_the_key_that_it_needs(browser: Browser) -> None:
    with served(KEYS) as site, visiting(browser, site.url, path="/docs") as page:
        expect(page.get_by_role("status")).to_contain_text("API key")
        page.get_by_label("API key").fill("user-key")
        page.get_by_role("button", name="Show the API").click()
        expect(page.locator("#api .opblock").first).to_be_visible()
        expect(page.locator("#api")).to_contain_text("/v1/chat/completions")
