from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_serve.catalog import file_store
from lora_serve.catalog.file_store import FileStore
from lora_serve.catalog.records import Member, Record, Report
from lora_serve.errors import CatalogRefusedError, CatalogUnavailableError, ConfigError

MEMBER = Member(replica_id="one", address="http://one", incarnation="1")
A = Record(name="a", digest="aa", source="/a")


def test_the_file_is_its_users_alone_and_outlives_its_store(tmp_path: Path) -> None:
    path = tmp_path / "catalog"
    store = FileStore(path)
    written = store.put(A, 0)
    store.close()
    assert path.stat().st_mode & 0o777 == 0o600
    again = FileStore(path)
    assert again.snapshot().records == (written,)
    again.close()


def test_a_file_that_is_no_catalog_is_refused(tmp_path: Path) -> None:
    text, other, open_to_all = (tmp_path / name for name in ("text", "other", "open"))
    text.write_text("no database " * 100)
    text.chmod(0o600)
    database = sqlite3.connect(other)
    database.execute("CREATE TABLE mine (id)")
    database.close()
    other.chmod(0o600)
    FileStore(open_to_all).close()
    open_to_all.chmod(0o666)
    for path, told in (
        (text, "file is not a database"),
        (other, "is a database, but no catalog of this version"),
        (open_to_all, "others may write to it"),
        (tmp_path / "nowhere" / "catalog", "No such file or directory"),
        (tmp_path, "Is a directory"),
    ):
        with pytest.raises(ConfigError, match=told):
            FileStore(path)


def test_a_full_disk_refuses_a_change_and_keeps_what_there_is(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "catalog")
    written = store.put(A, 0)
    store._calls.execute("PRAGMA max_page_count = 1")  # as many as there are
    with pytest.raises(CatalogRefusedError, match="full"):
        store.put(Record(name="b", digest="bb", source="/" + "b" * 50_000), 0)
    assert store.snapshot().records == (written,)
    store.close()


@pytest.mark.parametrize("table", ["meta SET serial", "forgotten SET generation"])
@pytest.mark.parametrize("forged", ["9007199254740992", "-5", "'x'", "1.5"])
def test_a_forged_number_is_refused_where_it_is_read(
    table: str, forged: str, tmp_path: Path
) -> None:
    store = FileStore(tmp_path / "catalog")
    store._calls.execute("INSERT INTO forgotten VALUES (0)")
    store._calls.execute(f"UPDATE {table} = {forged}")
    with pytest.raises(CatalogUnavailableError, match="Expected `int`"):
        store.snapshot()
    store.close()


def test_what_sqlite_has_no_code_for_is_an_error_of_the_store(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "catalog")
    store.close()
    with pytest.raises(CatalogUnavailableError, match="closed database"):
        store.get("a")


def test_who_is_far_behind_finds_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_store, "MAX_CHANGES", 3)
    store = FileStore(tmp_path / "catalog")
    for number in range(5):
        assert store.put(Record(name=f"n{number}", digest="aa", source="/a"), 0) is not None
    changes = store.changes(0, 0)
    assert [change.serial for change in changes] == [3, 4, 5]
    assert changes[0].previous == 2
    store.close()


def test_a_file_that_is_locked_for_long_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_store, "BUSY_SECONDS", 0.01)
    store = FileStore(tmp_path / "catalog")
    other = sqlite3.connect(tmp_path / "catalog", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(CatalogUnavailableError, match="database is locked"):
        store.put(A, 0)
    other.execute("ROLLBACK")
    other.close()
    assert store.put(A, 0) is not None
    store.close()


@pytest.mark.parametrize("text", [b"no JSON", b'{"name": 7}', 7, b"\xff"], ids=repr)
def test_what_no_catalog_has_written_there_makes_it_unavailable(
    tmp_path: Path, text: object
) -> None:
    """Another error would end the tasks that follow the catalog, and no line would tell of it."""
    path = tmp_path / "catalog"
    store = FileStore(path)
    store.join(MEMBER)
    store.put(A, 0)
    for change in (
        "UPDATE names SET record = ?",
        "UPDATE changes SET change = ?",
        "UPDATE replicas SET member = ?",
    ):
        with sqlite3.connect(path) as other:
            other.execute(change, (text,))
    asked: tuple[Callable[[], object], ...] = (
        store.snapshot,
        store.standings,
        lambda: store.get("a"),
        lambda: store.put(A, 1),
        lambda: store.changes(0, 0),
        lambda: store.renew(MEMBER, Report()),
    )
    for ask in asked:
        with pytest.raises(CatalogUnavailableError, match="catalog"):
            ask()
    store.close()
