from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lora_serve.check.catalog import PROBES
from lora_serve.cli.main import main
from tests.check.conftest import CONFIG
from tests.fakes.cached_server import Bug, CachedServer
from tests.fakes.http_server import Call, serving

FEW = (
    "--probe",
    "cached-logprobs",
    "--probe",
    "reload-in-place",
    "--probe",
    "prompt-logprobs-cached",
)


@pytest.fixture
def root(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def test_a_right_server_passes(root: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(CachedServer(root)) as url:
        code = main(["check", url, *FEW])
    told = capsys.readouterr().out
    assert code == 0
    assert "3 probes: 3 pass" in told
    assert "cold answers  a cache_salt of its own" in told
    assert "\x1b" not in told


def test_a_wrong_server_is_explained_and_written_down(
    root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    as_json, as_junit = tmp_path / "out.json", tmp_path / "out.xml"
    with serving(CachedServer(root, Bug.KEY_HOLDS_THE_NAME)) as url:
        files = ("--json", str(as_json), "--junit", str(as_junit))
        code = main(["check", url, *FEW, "--api-key", "hush", *files])
    told = capsys.readouterr().out
    assert code == 1
    assert "reload-in-place         FAIL" in told
    assert "happened      After B was loaded under A's name, the name did not answer as B" in told
    assert "first differ" in told
    assert "curl -s -X POST $URL/v1/load_lora_adapter" in told
    assert "3 probes: 2 pass, 1 FAIL" in told
    document = json.loads(as_json.read_text())
    by_name = {one["name"]: one for one in document["probes"]}
    assert by_name["reload-in-place"]["verdict"] == "fail"
    assert by_name["reload-in-place"]["finding"]["right"]
    paths = [one["path"] for one in by_name["reload-in-place"]["requests"]]
    assert paths.count("/v1/load_lora_adapter") == 2
    assert by_name["cached-logprobs"]["requests"] == []
    assert "hush" not in as_json.read_text() + as_junit.read_text() + told
    suite = ElementTree.parse(as_junit).getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "0")
    (failure,) = suite.iter("failure")
    assert "first differ" in str(failure.text)


def test_a_server_writes_nothing_of_its_own_to_the_terminal(
    root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake, as_junit = CachedServer(root), tmp_path / "out.xml"

    async def hostile(call: Call) -> None:
        if call.path == "/v1/load_lora_adapter" and call.body.get("lora_name"):
            message = "\x1b]0;owned\x07 \u202e \x00 \ud800"
            await call.reply({"error": {"message": message}}, 500)
        else:
            await fake(call)

    with serving(hostile) as url:
        code = main(["check", url, *FEW, "--junit", str(as_junit)])
    told = capsys.readouterr().out
    assert code == 0
    assert r"\x1b]0;owned\x07 \u202e \x00 \ud800" in told
    assert not {"\x1b", "\x07", "\u202e", "\x00"} & set(told)
    assert ElementTree.parse(as_junit).getroot().get("skipped") == "1"


def test_nobody_there_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "http://127.0.0.1:1"]) == 2
    assert "no server can be reached at http://127.0.0.1:1: " in capsys.readouterr().err


def test_the_probes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--list"]) == 0
    told = capsys.readouterr().out
    assert all(f"{probe.name}\n    {probe.proves}" in told for probe in PROBES)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("", "name the server"),
        ("ftp://host", "want http://HOST:PORT"),
        ("http://host --probe nothing", "--probe nothing is not one of"),
        ("http://host --adapter one", "--adapter is given 1 times; give it twice"),
        ("http://host --tolerance 2", "--tolerance 2 must be"),
        ("http://host --timeout 0", "--timeout 0 must be above 0"),
        ("http://host --prompt-tokens 0", "must be at least 1"),
        ("http://host --served-adapter a={ --served-adapter b", "no JSON after the ="),
        ("http://host --served-adapter a=5 --served-adapter b", "must be NAME or NAME=JSON"),
        ("http://host --api-key-file /nowhere", "--api-key-file /nowhere"),
        ("http://host --cacert /nowhere", "--cacert /nowhere"),
        ("http://host --workspace /nowhere/at/all", "--workspace /nowhere/at/all"),
    ],
)
def test_mistakes_are_told_in_one_line(
    words: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *words.split()]) == 2
    assert complaint in capsys.readouterr().err


def test_a_key_comes_from_a_file_or_the_environment(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, sent = CachedServer(root), set()

    async def noting(call: Call) -> None:
        sent.add(call.headers.get("authorization"))
        await fake(call)

    file = tmp_path / "key"
    file.write_text("from-file\n")
    monkeypatch.setenv("OPENAI_API_KEY", "from-environment")
    with serving(noting) as url:
        main(["check", url, "--probe", "cached-logprobs", "--api-key-file", str(file)])
        main(["check", url, "--probe", "cached-logprobs"])
    assert sent == {"Bearer from-file", "Bearer from-environment"}


def test_adapters_of_the_users_are_copied_and_used(root: str, tmp_path: Path) -> None:
    from lora_serve.check.adapters import ModelShape, write_adapter

    shape = ModelShape.read(Path(root))
    for seed, name in enumerate("ab"):
        write_adapter(tmp_path / name, shape, "", seed, 1.0)
    chosen = [word for name in "ab" for word in ("--adapter", str(tmp_path / name))]
    workspace = tmp_path / "shared"
    workspace.mkdir()
    with serving(CachedServer("")) as url:
        given = [*chosen, "--workspace", str(workspace), "--probe", "same-path-in-place"]
        assert main(["check", url, *given]) == 0
    assert list(workspace.iterdir()) == []
