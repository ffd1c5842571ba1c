from __future__ import annotations

import re
from pathlib import Path

import pytest

from lora_serve.adapters.location import HubAdapter, download_from_hub, find_adapter
from lora_serve.errors import AdapterError, AdapterNotFoundError
from tests.adapters.conftest import Shapes
from tests.fakes.adapter_files import lora_tensors, write_adapter
from tests.fakes.hub import serve_hub


@pytest.fixture
def adapter(tmp_path: Path, lora_modules: Shapes) -> Path:
    return Path(write_adapter(tmp_path / "roots" / "a" / "adapter", lora_tensors(lora_modules)))


def test_a_directory_is_its_real_path(tmp_path: Path, adapter: Path) -> None:
    link = tmp_path / "latest"
    link.symlink_to(adapter)
    assert find_adapter(str(link)) == str(adapter)


def test_a_relative_directory_wins_over_a_hub_id(
    adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(adapter.parent.parent)
    assert find_adapter("a/adapter") == str(adapter)


def test_the_home_directory_is_expanded(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(adapter.parent))
    assert find_adapter("~/adapter") == str(adapter)


@pytest.mark.parametrize(
    "path", ["/no/where", "nowhere", "a/b/c", "../x/y", "./y", "", "a b/c", "-/", "a/\n"]
)
def test_what_is_neither_directory_nor_hub_id_is_not_found(
    tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AdapterNotFoundError, match=r"^No adapter found for "):
        find_adapter(path)


def test_a_relative_path_is_told_where_it_begins() -> None:
    with pytest.raises(AdapterNotFoundError, match="no such directory; it begins where the server"):
        find_adapter("adapters/of/a")
    with pytest.raises(AdapterNotFoundError, match=r"/of/a: there is no such directory$"):
        find_adapter("/adapters/of/a")


def test_a_directory_may_have_any_name_that_is_text(adapter: Path) -> None:
    path = adapter.rename(adapter.with_name("ünï cödé\u3000\n?"))
    assert find_adapter(str(path)) == str(path)


@pytest.mark.parametrize("path", ["a\0b", "\udcff/x", "x" * 5000])
def test_a_path_that_no_file_can_have_is_not_found(path: str) -> None:
    with pytest.raises(AdapterNotFoundError, match=r"^No adapter found for ") as error:
        find_adapter(path)
    str(error.value).encode()


# ── allowed roots ───────────────────────────────────────────────────────────────────────────


def test_below_an_allowed_root_anything_may_be_loaded(tmp_path: Path, adapter: Path) -> None:
    roots = ["/srv/adapters", str(tmp_path / "roots")]
    assert find_adapter(str(adapter), roots) == str(adapter)


def test_a_root_may_itself_be_a_link(tmp_path: Path, adapter: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "roots")
    path = str(link / "a" / "adapter")
    assert find_adapter(path, [str(link)]) == str(adapter)


@pytest.mark.parametrize("path", ["{roots}/../other", "{other}", "{roots}x", "/etc", "org/name"])
def test_outside_the_allowed_roots_nothing_is_loaded(
    tmp_path: Path, adapter: Path, path: str
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "rootsx").mkdir()
    roots = str(tmp_path / "roots")
    path = path.format(roots=roots, other=tmp_path / "other")
    with pytest.raises(AdapterError, match=r"does not lie below --lora-allowed-roots \(/.*roots\)"):
        find_adapter(path, [roots])


def test_a_link_does_not_lead_out_of_the_roots(tmp_path: Path, adapter: Path) -> None:
    outside = tmp_path / "outside"
    adapter.rename(outside)
    adapter.symlink_to(outside)
    with pytest.raises(AdapterError, match="does not lie below"):
        find_adapter(str(adapter), [str(tmp_path / "roots")])


def test_a_hub_id_below_an_allowed_root_is_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AdapterNotFoundError):
        find_adapter("org/name", [str(tmp_path)])


# ── the hub ─────────────────────────────────────────────────────────────────────────────────


def test_what_looks_like_a_hub_id_is_to_be_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_adapter("org/name") == HubAdapter("org/name")
    assert find_adapter("org/name@v1.0") == HubAdapter("org/name", "v1.0")


def test_an_adapters_two_files_are_fetched_from_the_hub(tmp_path: Path, adapter: Path) -> None:
    files = {file.name: file.read_bytes() for file in adapter.iterdir()}
    with serve_hub("org/name", files | {"README.md": b"#", "optimizer.pt": b"?"}) as endpoint:
        path = download_from_hub(
            HubAdapter("org/name"),
            2**20,
            2**30,
            endpoint=endpoint,
            cache_dir=str(tmp_path / "cache"),
        )
    fetched = {file.name: file.read_bytes() for file in Path(path).iterdir()}
    assert fetched == files


def test_a_repository_that_the_hub_lacks_is_not_found(tmp_path: Path) -> None:
    with (
        serve_hub("org/name", {}) as endpoint,
        pytest.raises(AdapterNotFoundError, match=r"^No adapter found for org/other: "),
    ):
        download_from_hub(
            HubAdapter("org/other"), 2**20, 2**30, endpoint=endpoint, cache_dir=str(tmp_path)
        )


def test_a_hub_that_does_not_answer_has_no_adapter(tmp_path: Path) -> None:
    with serve_hub("org/name", {}) as endpoint:
        pass
    with pytest.raises(AdapterNotFoundError, match=r"^No adapter found for org/name: "):
        download_from_hub(
            HubAdapter("org/name"), 2**20, 2**30, endpoint=endpoint, cache_dir=str(tmp_path)
        )


def test_a_revision_of_a_repository_is_fetched(tmp_path: Path, adapter: Path) -> None:
    files = {file.name: file.read_bytes() for file in adapter.iterdir()}
    cache = str(tmp_path / "cache")
    with serve_hub("org/name", files) as endpoint:
        main = HubAdapter("org/name", "main")
        path = download_from_hub(main, 2**20, 2**30, endpoint=endpoint, cache_dir=cache)
        assert {file.name for file in Path(path).iterdir()} == set(files)
        with pytest.raises(AdapterNotFoundError, match=r"^No adapter found for org/name@v2: "):
            download_from_hub(
                HubAdapter("org/name", "v2"), 2**20, 2**30, endpoint=endpoint, cache_dir=cache
            )


def test_what_is_too_large_is_not_fetched(tmp_path: Path, adapter: Path) -> None:
    files = {file.name: file.read_bytes() for file in adapter.iterdir()}
    size = sum(map(len, files.values()))
    cache = tmp_path / "cache"
    message = rf"org/name has {size} bytes, more than --lora-max-download-bytes {size - 1}"
    with (
        serve_hub("org/name", files | {"pytorch_model.bin": bytes(2**20)}) as endpoint,
        pytest.raises(AdapterError, match=message),
    ):
        download_from_hub(
            HubAdapter("org/name"), size - 1, 2**30, endpoint=endpoint, cache_dir=str(cache)
        )
    assert not cache.exists()


def test_a_repository_without_an_adapter_is_not_found(tmp_path: Path) -> None:
    with (
        serve_hub("org/name", {"README.md": b"#"}) as endpoint,
        pytest.raises(AdapterNotFoundError, match=r"it has no adapter_config\.json"),
    ):
        download_from_hub(
            HubAdapter("org/name"), 2**20, 2**30, endpoint=endpoint, cache_dir=str(tmp_path)
        )


def test_no_more_is_downloaded_than_the_cache_may_hold_of_adapters(
    tmp_path: Path, adapter: Path
) -> None:
    files = {file.name: file.read_bytes() for file in adapter.iterdir()}
    size = sum(map(len, files.values()))
    cache = str(tmp_path / "cache")

    def download(name: str, max_cache_bytes: int) -> str:
        with serve_hub(name, files) as endpoint:
            return download_from_hub(
                HubAdapter(name), size, max_cache_bytes, endpoint=endpoint, cache_dir=cache
            )

    model = tmp_path / "cache" / "models--org--model" / "snapshots" / ("d" * 40)
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(bytes(10 * size))
    first = download("org/one", size)
    told = (
        f"org/two: {size} bytes are to be downloaded, and adapters in the hub's cache have {size} "
        f"of --lora-hub-cache-bytes {2 * size - 1}; delete some of them there"
    )
    with pytest.raises(AdapterError, match=re.escape(told)):
        download("org/two", 2 * size - 1)
    assert download("org/one", 1) == first, "what is there already takes no room"
    assert download("org/two", 2 * size) != first
