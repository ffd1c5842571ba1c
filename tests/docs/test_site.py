"""The documents as a site: every page is in the nav, and the strict build finds nothing lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from docsite.anchors import github_slug
from docsite.hook import FROM_ROOT, for_the_site
from docsite.reference import PAGES, metric_families
from lora_serve.server.http.errors import STATUS_AND_TYPE
from lora_serve.server.routes import OPERATIONS
from tests.deploy.command_lines import serve_flags

ROOT = Path(__file__).parents[2]


def nav() -> list[str]:
    """The pages of mkdocs.yml, in the order of their sections."""
    text = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    return list(_pages(yaml.safe_load(text)))


def _pages(entries: Any) -> Iterator[str]:
    if isinstance(entries, str):
        yield entries
    for entry in entries.values() if isinstance(entries, dict) else entries:
        if not isinstance(entries, str):
            yield from _pages(entry)


def test_every_page_is_in_the_nav_once() -> None:
    """A new page of docs/ needs a line under `nav` in mkdocs.yml."""
    pages = [path.name for path in (ROOT / "docs").glob("*.md")]
    assert sorted(nav()) == sorted([*pages, *PAGES, *FROM_ROOT.values()])


def test_the_strict_build_finds_no_lost_page_link_or_anchor(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="*** THE SITE IS NOT BUILT: needs the extra docs ***")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    environment = {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1", "PATH": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    for page in nav():
        html = (tmp_path / page).with_suffix(".html").read_text()
        assert "https://fonts." not in html, "the site is read offline"


def test_the_flags_page_has_every_flag() -> None:
    page = PAGES["reference/flags.md"]()
    assert [flag for flag in serve_flags() if f"`{flag}`" not in page and flag != "--help"] == []
    assert "### lora-serve kv clear" in page


def test_the_routes_page_has_every_route() -> None:
    page = PAGES["reference/routes.md"]()
    for each in OPERATIONS:
        assert f"| `{each.method.upper()} {each.path}` |" in page


def test_the_metrics_page_has_every_family_with_its_labels() -> None:
    page = PAGES["reference/metrics.md"]()
    families = [family for group in metric_families().values() for family in group]
    assert len(families) > 50
    assert "`vllm:num_requests_waiting`" in page
    (row,) = [line for line in page.splitlines() if "`lora_serve:adapter_requests_total`" in line]
    assert "`lora_name`" in row


def test_the_errors_page_has_every_status() -> None:
    page = PAGES["reference/errors.md"]()
    for status, kind in STATUS_AND_TYPE.values():
        assert any(f"| {status} " in line and kind in line for line in page.splitlines())


def test_links_of_the_repository_become_links_of_the_site() -> None:
    text = "[a](docs/api.md#limits) [b](SECURITY.md) [c](LICENSE) [d](https://e.org) [e](#f)"
    told = "[a](api.md#limits) [b](SECURITY.md) c [d](https://e.org) [e](#f)"
    assert for_the_site(text, "") == told
    text = "[a](api.md) [b](../README.md) [c](../benchmarks/results/soak.json)"
    assert for_the_site(text, "docs") == "[a](api.md) [b](index.md) c"


def test_anchors_are_githubs() -> None:
    assert github_slug("What an answer's `n` is, or is not") == "what-an-answers-n-is-or-is-not"
