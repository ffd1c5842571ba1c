"""What the documents say of the tree is so: files, links, flags, and how long they may be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

import pytest

from docsite.anchors import github_slug
from lora_serve.cli.main import main
from lora_serve.config.model import CHECKPOINT_FORMATS
from lora_serve.models.registry import ARCHITECTURES
from lora_serve.server.routes import PATHS

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
MOST_LINES = {"README.md": 150, "docs/architecture.md": 250}
MOST_COLUMNS = 100
MOST_BYTES = 100_000  # of a picture, too
SOURCES = (".py", ".h", ".cpp", ".cu", ".md", ".toml", ".json", ".png")
COMMANDS = (
    *(
        "serve",
        "chat",
        "check",
        "top",
        "completion",
        "adapters ls",
        "adapters replace",
        "adapters verify",
        "doctor",
        "demo",
        "fuzz",
        "simulate",
        "simulate fit",
        "merge",
        "convert",
    ),
    *("bench latency", "bench throughput", "bench serve"),
    *("kv ls", "kv verify", "kv stats", "kv clear"),
)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GENERATED = re.compile(r"<!-- peers: begin -->.*<!-- peers: end -->", re.DOTALL)


def shown(document: Path) -> str:
    return document.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("name", MOST_LINES)
def test_the_first_documents_stay_short(name: str) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= MOST_LINES[name]


@pytest.mark.parametrize("document", DOCUMENTS, ids=shown)
def test_lines_fit_a_screen(document: Path) -> None:
    lines = GENERATED.sub("", document.read_text()).splitlines()
    assert [line for line in lines if len(line) > MOST_COLUMNS and not line.startswith("|")] == []


def test_the_house_of_contributing_has_every_part() -> None:
    """Packages and modules of lora_serve, each by its name in the tree that is drawn there."""
    blocks = [block for _, block in FENCE.findall((ROOT / "CONTRIBUTING.md").read_text())]
    (house,) = [block for block in blocks if block.startswith("lora_serve/")]
    package = ROOT / "lora_serve"
    packages = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    modules = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    assert sorted((packages | modules) - set(house.split())) == []


@pytest.mark.parametrize("document", sorted((ROOT / "docs").iterdir()), ids=shown)
def test_nothing_in_docs_is_large(document: Path) -> None:
    assert document.stat().st_size <= MOST_BYTES


@pytest.mark.parametrize("document", DOCUMENTS, ids=shown)
def test_every_path_exists(document: Path) -> None:
    assert [path for path in sorted(set(paths(document))) if not exists(path)] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=shown)
def test_every_link_leads_somewhere(document: Path) -> None:
    lost = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(document)):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (document.parent / name) if name else document
        if not file.exists() or (anchor and anchor not in anchors(file)):
            lost.append(target)
    assert lost == []


# What docs/models.md calls a family whose architecture is called otherwise.
FAMILIES = {
    "Cohere": "Command R",
    "Cohere2": "Command R7B",
    "GraniteMoe": "Granite 3",
    "GraniteMoeHybrid": "Granite 4",
    "GraniteMoeShared": "Granite 3",
}


def letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def test_every_family_and_every_format_is_among_the_documented_models() -> None:
    text = (ROOT / "docs" / "models.md").read_text()
    table = "".join(re.findall(r"^\|.*$", text.partition("## Other models")[0], re.MULTILINE))
    families = [re.sub("For(CausalLM|ConditionalGeneration)", "", name) for name in ARCHITECTURES]
    named = [FAMILIES.get(name, name) for name in families]
    assert [name for name in named if letters(name) not in letters(table)] == []
    assert [name for name in CHECKPOINT_FORMATS if letters(name) not in letters(text)] == []


def test_every_route_is_among_the_documented_ones() -> None:
    """But for the files of pages. `…` stands for how the path before it begins."""
    table = (ROOT / "docs" / "api.md").read_text().partition("## Fields")[0]
    told = set(re.findall(r"`([/…][^`]*)`", table))
    paths = {re.sub("{.*?}", "{id}", path) for path in PATHS}
    ends = tuple(path[1:] for path in told if path[0] == "…")
    untold = {path for path in paths - told if not path.endswith(ends)}
    assert [path for path in sorted(untold) if not path.startswith(("/ui/", "/docs/"))] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=shown)
def test_every_flag_exists(document: Path, flags: frozenset[str]) -> None:
    assert sorted(set(flags_named(document)) - flags) == []


@pytest.fixture(scope="module")
def flags() -> frozenset[str]:
    """The flags of every command, and of the scripts that measure."""
    pages = [help_of(command) for command in COMMANDS]
    scripts = [path.read_text() for path in (ROOT / "benchmarks").rglob("*.py")]
    named = re.findall(r"--[a-z][a-z-]+", "\n".join(pages))
    return frozenset([*named, *re.findall(r'"(--[a-z][a-z-]+)"', "\n".join(scripts))])


def help_of(command: str) -> str:
    page = StringIO()
    with redirect_stdout(page), pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    return page.getvalue()


def flags_named(document: Path) -> Iterator[str]:
    """Flags that stand alone or behind `lora-serve`; other programs have their own."""
    text = prose(document)
    if document.name.startswith("from-"):  # the first column is the other engine's
        text = re.sub(r"^\| .*? \|", "|", text, flags=re.MULTILINE)
    for command in (*spans(text), *command_lines(document)):
        if command.startswith(("lora-serve ", "--")):
            yield from re.findall(r"(?<![\w-])--[a-z][a-z-]+", command.partition(" #")[0])


def command_lines(document: Path) -> Iterator[str]:
    for _, block in FENCE.findall(document.read_text()):
        yield from block.replace("\\\n", " ").splitlines()


def paths(document: Path) -> Iterator[str]:
    """Words in code that begin with a folder of the repository, or end as a source file does."""
    for span in spans(prose(document)):
        for word in span.split():
            is_path = "/" in word and not word.startswith(("/", "-", "."))
            if is_path and (first_folder_exists(word) or word.endswith(SOURCES)):
                yield word
    for kind, block in FENCE.findall(document.read_text()):
        if kind == "text":
            yield from re.findall(r"\b[a-z_]+/[a-z_/]*\.py\b", block)


def first_folder_exists(word: str) -> bool:
    return exists(word.partition("/")[0] + "/")


def exists(path: str) -> bool:
    """Below the repository or the package; `<…>` and `*` stand for anything."""
    if "<" in path or "*" in path:
        return True
    return any((base / path).exists() for base in (ROOT, ROOT / "lora_serve"))


def prose(document: Path) -> str:
    return FENCE.sub("", document.read_text())


def spans(text: str) -> list[str]:
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]


@cache
def anchors(document: Path) -> frozenset[str]:
    """The anchors that GitHub makes from headings, and the site as well."""
    headings = re.findall(r"^#+ (.+)$", prose(document), re.MULTILINE)
    return frozenset(map(github_slug, headings))
