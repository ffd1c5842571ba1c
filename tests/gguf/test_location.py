from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from lora_serve.errors import ConfigError
from lora_serve.gguf.location import gguf_file, hub_parts, names_gguf

FILES = ("a-Q4_K_M.gguf", "a-Q4_K_S.gguf", "a.q8_0.gguf", "BF16/a-BF16-00001.gguf", "README.md")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Stands in for the hub, with the files above; the calls it gets."""
    calls: list[dict[str, Any]] = []

    def snapshot_download(repository: str, **options: Any) -> str:
        calls.append({"repository": repository, **options})
        for name in FILES:
            if huggingface_hub.utils.filter_repo_objects([name], allow_patterns=None):
                path = tmp_path / name
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(b"GGUF")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


@pytest.mark.parametrize(
    ("wanted", "file"),
    [
        ("Q4_K_M", "a-Q4_K_M.gguf"),
        ("q4_k_s", "a-Q4_K_S.gguf"),
        ("Q8_0", "a.q8_0.gguf"),
        ("BF16", "BF16/a-BF16-00001.gguf"),
        ("a-Q4_K_M.gguf", "a-Q4_K_M.gguf"),
    ],
)
def test_a_quantisation_or_a_file_of_a_repository_is_found(
    wanted: str, file: str, hub: list[dict[str, Any]], tmp_path: Path
) -> None:
    assert gguf_file(f"org/repo:{wanted}", "v2") == tmp_path / file
    assert (hub[0]["repository"], hub[0]["revision"]) == ("org/repo", "v2")
    fetched = huggingface_hub.utils.filter_repo_objects(
        FILES, allow_patterns=hub[0]["allow_patterns"]
    )
    assert list(fetched) == [file]


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("wanted", ["Q5_K", "b.gguf", "K_M"])
def test_a_repository_without_it_is_told(wanted: str) -> None:
    with pytest.raises(ConfigError, match=rf"org/repo:{wanted}: the repository has no such GGUF"):
        gguf_file(f"org/repo:{wanted}")


@pytest.mark.usefixtures("hub")
def test_one_of_several_must_be_named(tmp_path: Path) -> None:
    (tmp_path / "b-Q4_K_M.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"a-Q4_K_M\.gguf, b-Q4_K_M\.gguf fit this name; name"):
        gguf_file("org/repo:Q4_K_M")


def test_a_hub_that_cannot_be_asked_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(repository: str, **options: object) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ConfigError, match=r"org/repo:Q4_0 could not be fetched.*offline"):
        gguf_file("org/repo:Q4_0")


def test_names_of_other_things_mean_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("org").mkdir()
    Path("org/x:Q4").mkdir()
    for name in ("", "org/name", str(tmp_path), "org/x:Q4", "a/b/c:Q4", "nowhere.gguf"):
        assert gguf_file(name) is None
        assert hub_parts(name) is None
    assert names_gguf("nowhere.gguf")
    assert not names_gguf("org/name")
