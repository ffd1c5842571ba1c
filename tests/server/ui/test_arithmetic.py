"""The page's arithmetic, in the browser that runs it: metrics, history, axes, differences."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files

import pytest
from playwright.sync_api import Browser, Page, Route
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest

HOME = "http://page.test/"
STATIC = files("lora_serve.server.ui") / "static"


@pytest.fixture(scope="module")
def page(browser: Browser) -> Iterator[Page]:
    """An empty page whose modules are the package's files, without a server."""

    def answer(route: Route) -> None:
        name = route.request.url.removeprefix(HOME)
        if name:
            body = (STATIC / name).read_text(encoding="utf-8")
            route.fulfill(body=body, content_type="text/javascript")
        else:
            route.fulfill(body="", content_type="text/html")

    page = browser.new_page()
    page.route(f"{HOME}**", answer)
    page.goto(HOME)
    yield page
    page.close()


def call(page: Page, module: str, body: str, *arguments: object) -> object:
    """What `body` gives, which has the module's names in `m` and the arguments in `a`."""
    script = f"async a => {{ const m = await import('{HOME}{module}.js'); {body} }}"
    return page.evaluate(script, list(arguments))


def test_a_page_of_prometheus_own_client_is_read_whatever_its_labels_hold(page: Page) -> None:
    registry = CollectorRegistry()
    hostile = 'a"b\\c\nd}e,f="g" 7'
    counter = Counter("x:hits", "Hits.", ("lora_name", "b"), registry=registry)
    counter.labels(hostile, "1").inc(3)
    counter.labels("plain", "2").inc(1e21)
    Counter("bare", "Bare.", registry=registry).inc(5)
    text = generate_latest(registry).decode()
    read = "const p = m.parseMetrics(a[0]);"
    body = f"{read} return m.totalsBy(p, 'x:hits_total', 'lora_name');"
    assert call(page, "metrics", body, text) == {hostile: 3, "plain": 1e21}
    assert call(page, "metrics", f"{read} return m.total(p, 'bare_total');", text) == 5
    assert call(page, "metrics", f"{read} return m.total(p, 'absent');", text) == 0


def test_quantiles_are_those_of_what_came_between_two_pages(page: Page) -> None:
    registry = CollectorRegistry()
    histogram = Histogram("t", "Times.", buckets=(1.0, 2.0, 4.0), registry=registry)

    def quantile(q: float, before: str, after: str) -> object:
        body = """const [b, c] = [a[1], a[2]].map(t => m.buckets(m.parseMetrics(t), "t"));
            return m.quantile(a[0], b, c);"""
        return call(page, "metrics", body, q, before, after)

    for _ in range(100):
        histogram.observe(0.5)
    before = generate_latest(registry).decode()
    assert quantile(0.5, before, before) is None
    for seconds in (1.5, 1.5, 3.0, 3.0):
        histogram.observe(seconds)
    after = generate_latest(registry).decode()
    assert quantile(0.5, before, after) == 2.0
    assert quantile(0.75, before, after) == 3.0
    assert quantile(0.5, "", after) == pytest.approx(0.52)
    histogram.observe(100.0)
    assert quantile(0.99, before, generate_latest(registry).decode()) == 4.0
    assert quantile(0.5, after, before) == pytest.approx(0.5)  # another process has begun anew


def test_rates_and_shares_are_of_the_last_seconds_and_never_across_a_pause(page: Page) -> None:
    sample = """({time, generated = 0, computed = 0, queries = 0, hits = 0}) => ({time, generated,
        computed, queries, hits, tierHits: 0, running: 1, waiting: 0, kvUsage: 0.5,
        firstToken: [], interToken: []})"""
    body = f"""const sample = {sample}; const h = new m.History();
        for (const each of a[0]) each === null ? h.pause() : h.add(sample(each));
        return h.points;"""
    steady = [
        {"time": t, "generated": 10 * t, "computed": 15 * t, "queries": 4 * t, "hits": t}
        for t in range(0, 20, 2)
    ]
    first, *_, last = call(page, "history", body, steady)
    assert first == {"time": 0, "running": 1, "waiting": 0, "kvUsage": 0.5}
    assert (last["generated"], last["prompt"], last["hitRate"]) == (10, 5, 0.25)
    assert last["firstTokenP50"] is None
    begun_anew = [*steady, {"time": 20, "generated": 6, "computed": 6}]
    assert call(page, "history", body, begun_anew)[-1]["generated"] == 1
    paused = [*steady, None, {"time": 300, "generated": 9000}]
    *_, gap, after = call(page, "history", body, paused)
    assert gap == {"time": 18}
    assert "generated" not in after
    long = [{"time": 2 * t} for t in range(1000)]
    assert len(call(page, "history", body, long)) == 151


@pytest.mark.parametrize(
    ("highest", "most", "ticks"),
    [
        (0, None, [0, 0.25, 0.5, 0.75, 1]),
        (7, None, [0, 2, 4, 6, 8]),
        (1234, None, [0, 500, 1000, 1500]),
        (0.04, None, [0, 0.01, 0.02, 0.03, 0.04]),
        (0.3, 1, [0, 0.25, 0.5, 0.75, 1]),
    ],
)
def test_an_axis_has_round_figures(
    page: Page, highest: float, most: float | None, ticks: list[float]
) -> None:
    body = "return m.niceTicks(a[0], 4, a[1] ?? undefined);"
    assert call(page, "chart", body, highest, most) == ticks


def test_a_line_is_broken_where_nothing_is_known(page: Page) -> None:
    points = [{"v": 1}, {"v": 2}, {}, {"v": None}, {"v": 3}, {"v": 4}]
    points = [{"time": time, **point} for time, point in enumerate(points)]
    drawn = call(page, "chart", "return m.path(a[0], 'v', x => x, y => y);", points)
    assert drawn == "M0.0 1.0L1.0 2.0M4.0 3.0L5.0 4.0"


@pytest.mark.parametrize(
    ("one", "one_is_over", "other", "other_is_over", "difference"),
    [
        ("", False, "", False, None),
        ("abc", False, "abd", False, 2),
        ("abc", False, "abcd", False, None),
        ("abc", True, "abcd", False, 3),
        ("abc", True, "ab", False, None),
        ("abc", True, "abc", False, None),
        ("abc", True, "abc", True, -1),
        ("\U0001f600", True, "\U0001f601", True, 0),  # their first halves are equal
        ("a\U0001f600b", True, "a\U0001f600c", True, 3),
    ],
)
def test_where_two_answers_differ_is_said_as_soon_as_it_is_sure(
    page: Page,
    one: str,
    one_is_over: bool,
    other: str,
    other_is_over: bool,
    difference: int | None,
) -> None:
    body = "return m.firstDifference({text: a[0], isOver: a[1]}, {text: a[2], isOver: a[3]});"
    arguments = (one, one_is_over, other, other_is_over)
    assert call(page, "difference", body, *arguments) == difference


@pytest.mark.parametrize(
    ("call_of", "shown"),
    [
        ("figure(12.34)", "12.3"),
        ("figure(12345)", "12.3K"),
        ("figure(null)", "–"),
        ("percent(0.123)", "12.3 %"),
        ("seconds(0.0042)", "4.2 ms"),
        ("seconds(0.25)", "250 ms"),
        ("seconds(2.5)", "2.5 s"),
        ("duration(59)", "59 s"),
        ("duration(3725)", "1 h 2 min"),
        ("bytes(512)", "512 B"),
        ("bytes(3 * 2 ** 20)", "3 MiB"),
        ("version('0123456789abcdef', 2)", "0123456789ab-g2"),
    ],
)
def test_figures_are_short_and_have_their_units(page: Page, call_of: str, shown: str) -> None:
    assert call(page, "format", f"return m.{call_of};") == shown
