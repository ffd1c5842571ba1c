"""A catalog in a file of this machine, which its processes share: SQLite in WAL mode.

    meta      serial and the number of reports, one row
    names     name → its record; of names that were unloaded those that are to be kept
    unloaded  of these the serials and names
    forgotten the generation with which a name without a record begins, one row at most
    changes   the last MAX_CHANGES changes, by serial
    replicas  id → member, report, and when it was last heard from

Writers wait for each other, readers never. Each watch has a connection of its own and looks at
PRAGMA data_version, which costs microseconds and changes with each commit of another connection.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from lora_serve.catalog.records import (
    MAX_UNLOADED,
    Change,
    Member,
    Number,
    Record,
    Report,
    Snapshot,
    Standing,
)
from lora_serve.errors import CatalogRefusedError, CatalogUnavailableError, ConfigError

MAX_CHANGES = 4096
BUSY_SECONDS = 5.0  # for which a writer waits for another
WATCH_SECONDS = 0.02
SCHEMA_VERSION = 1
APPLICATION_ID = 0x4C6F5261  # "LoRa"
_SCHEMA = f"""
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
CREATE TABLE meta (serial INTEGER NOT NULL, reports INTEGER NOT NULL);
CREATE TABLE names (name TEXT PRIMARY KEY, serial INTEGER NOT NULL, record BLOB NOT NULL);
CREATE TABLE changes (serial INTEGER PRIMARY KEY, change BLOB NOT NULL);
CREATE TABLE replicas (
    id TEXT PRIMARY KEY, incarnation TEXT NOT NULL, member BLOB NOT NULL, report BLOB NOT NULL,
    heard REAL NOT NULL
);
INSERT INTO meta VALUES (0, 0);
"""
_ADDED = (  # to files of earlier releases, which leave these alone
    "CREATE TABLE IF NOT EXISTS unloaded (serial INTEGER PRIMARY KEY, name TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS forgotten (generation INTEGER NOT NULL)",
)
_NOTHING_REPORTED = msgspec.json.encode(Report())


class FileStore:
    """Makes the file if there is none, for the server's user alone."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError: it cannot be made or read, or is something else."""
        self._path = path
        self._lock = threading.Lock()
        self._locks = {"changes": threading.Lock(), "reports": threading.Lock()}
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                _check_owner(path, os.fstat(descriptor))
            finally:
                os.close(descriptor)
            self._calls = self._connect()
            self._watches = {name: self._connect() for name in self._locks}
            self._prepare()
        except (OSError, sqlite3.Error) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"--lora-catalog {path}: {reason}") from error

    @property
    def where(self) -> str:
        return str(self._path)

    def ping(self) -> None:
        self.get("")

    # ── names ───────────────────────────────────────────────────────────────────────────────

    def snapshot(self) -> Snapshot:
        with self._transaction() as rows:
            records = rows.execute("SELECT record FROM names ORDER BY serial").fetchall()
            members = rows.execute("SELECT member FROM replicas ORDER BY id").fetchall()
            return Snapshot(
                serial=_serial(rows),
                first_generation=_first_generation(rows),
                records=tuple(msgspec.json.decode(text, type=Record) for (text,) in records),
                members=tuple(msgspec.json.decode(text, type=Member) for (text,) in members),
            )

    def changes(self, since: int, seconds: float) -> list[Change]:
        query = "SELECT change FROM changes WHERE serial > ? ORDER BY serial"
        found = self._watched("changes", query, since, seconds)
        with self._errors():
            return [msgspec.json.decode(text, type=Change) for (text,) in found]

    def get(self, name: str) -> Record | None:
        with self._transaction() as rows:
            found, first = _record(rows, name), _first_generation(rows)
            return Record(name=name, generation=first) if found is None and first else found

    def put(self, record: Record, expected: int) -> Record | None:
        with self._transaction(writes=True) as rows:
            current = _record(rows, record.name)
            if (0 if current is None else current.serial) != expected:
                return None
            change = _append(rows, record=record)
            written = change.record
            assert written is not None, "it has been given"
            _keep(rows, written)
            return written

    # ── replicas ────────────────────────────────────────────────────────────────────────────

    def join(self, member: Member) -> None:
        with self._transaction(writes=True) as rows:
            _append(rows, joined=member)
            rows.execute(
                "INSERT OR REPLACE INTO replicas VALUES (?, ?, ?, ?, ?)",
                (
                    member.replica_id,
                    member.incarnation,
                    msgspec.json.encode(member),
                    _NOTHING_REPORTED,
                    time.time(),
                ),
            )
            _count_report(rows)

    def renew(self, member: Member, report: Report) -> Member | None:
        with self._transaction(writes=True) as rows:
            query = "SELECT member, report FROM replicas WHERE id = ?"
            found = rows.execute(query, (member.replica_id,)).fetchone()
            if found is None:
                return None
            registered = msgspec.json.decode(found[0], type=Member)
            if registered != member:
                return registered
            text = msgspec.json.encode(report)
            rows.execute(
                "UPDATE replicas SET report = ?, heard = ? WHERE id = ?",
                (text, time.time(), member.replica_id),
            )
            if text != found[1]:
                _count_report(rows)
            return registered

    def leave(self, replica_id: str, incarnation: str | None = None) -> bool:
        with self._transaction(writes=True) as rows:
            query = "DELETE FROM replicas WHERE id = ? AND incarnation = coalesce(?, incarnation)"
            if not rows.execute(query, (replica_id, incarnation)).rowcount:
                return False
            _append(rows, left=replica_id)
            _count_report(rows)
            return True

    def standings(self) -> list[Standing]:
        with self._transaction() as rows:
            found = rows.execute(
                "SELECT member, report, heard FROM replicas ORDER BY id"
            ).fetchall()
        now = time.time()
        with self._errors():
            return [
                Standing(
                    member=msgspec.json.decode(member, type=Member),
                    report=msgspec.json.decode(report, type=Report),
                    silent_seconds=max(0.0, now - heard),
                )
                for member, report, heard in found
            ]

    def await_reports(self, seen: int, seconds: float) -> int:
        found = self._watched(
            "reports", "SELECT reports FROM meta WHERE reports > ?", seen, seconds
        )
        return int(found[0][0]) if found else seen

    def restore(self, snapshot: Snapshot) -> None:
        """Do nothing: a file keeps what it was told."""

    def close(self) -> None:
        with self._lock:
            self._calls.close()
        for name, watch in self._watches.items():
            with self._locks[name]:
                watch.close()

    # ── the file ────────────────────────────────────────────────────────────────────────────

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(
            self._path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )

    def _prepare(self) -> None:
        rows = self._calls
        rows.execute("PRAGMA journal_mode = WAL")
        rows.execute("PRAGMA synchronous = NORMAL")  # what a crash of the machine loses, all lose
        rows.execute("BEGIN IMMEDIATE")
        try:
            (num_tables,) = rows.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            if not num_tables:
                for statement in _SCHEMA.split(";"):
                    rows.execute(statement)
            found = [rows.execute(f"PRAGMA {name}").fetchone()[0] for name in _IDENTITY]
            if found == [*_IDENTITY.values()]:
                for statement in _ADDED:
                    rows.execute(statement)
        finally:
            rows.execute("COMMIT")
        if found != [*_IDENTITY.values()]:
            raise ConfigError(
                f"--lora-catalog {self._path}: is a database, but no catalog of this version; name "
                "another file"
            )

    @contextmanager
    def _transaction(self, *, writes: bool = False) -> Iterator[sqlite3.Connection]:
        with self._lock, self._errors():
            self._calls.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
            try:
                yield self._calls
            except BaseException:
                if self._calls.in_transaction:  # a full disk has ended it
                    self._calls.execute("ROLLBACK")
                raise
            self._calls.execute("COMMIT")

    def _watched(self, watch: str, query: str, since: int, seconds: float) -> list[tuple[Any, ...]]:
        """What the query gives for `since`, once it gives something or the time is over."""
        end, version = time.monotonic() + seconds, -1
        with self._locks[watch], self._errors():
            rows = self._watches[watch]
            while True:
                before, (version,) = version, rows.execute("PRAGMA data_version").fetchone()
                if version != before and (found := rows.execute(query, (since,)).fetchall()):
                    return found
                if time.monotonic() >= end:
                    return []
                time.sleep(WATCH_SECONDS)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Other errors than SQLite's own come of what no catalog has written."""
        try:
            yield
        except (sqlite3.Error, ValueError, TypeError) as error:
            is_refusal = getattr(error, "sqlite_errorcode", None) in _REFUSALS
            kind = CatalogRefusedError if is_refusal else CatalogUnavailableError
            raise kind(f"the catalog {self._path}: {error}") from error


def _check_owner(path: Path, status: os.stat_result) -> None:
    """Raise ConfigError if others could say which adapters are served."""
    if status.st_uid not in (os.geteuid(), 0) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"--lora-catalog {path}: others may write to it (mode "
            f"{stat.S_IMODE(status.st_mode):04o}, uid {status.st_uid}); chown it, and chmod 600 it"
        )


# What ends a transaction with all that was written undone.
_REFUSALS = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_BUSY)

_IDENTITY = {"application_id": APPLICATION_ID, "user_version": SCHEMA_VERSION}


def _serial(rows: sqlite3.Connection) -> int:
    return msgspec.convert(rows.execute("SELECT serial FROM meta").fetchone()[0], Number)


def _record(rows: sqlite3.Connection, name: str) -> Record | None:
    found = rows.execute("SELECT record FROM names WHERE name = ?", (name,)).fetchone()
    return None if found is None else msgspec.json.decode(found[0], type=Record)


def _first_generation(rows: sqlite3.Connection) -> int:
    found = rows.execute("SELECT coalesce(max(generation), 0) FROM forgotten").fetchone()
    return msgspec.convert(found[0], Number)


def _keep(rows: sqlite3.Connection, record: Record) -> None:
    """Put a record in its name's place, as far as it is kept; forget one beyond MAX_UNLOADED."""
    rows.execute("DELETE FROM unloaded WHERE name = ?", (record.name,))
    if not record.is_kept(_first_generation(rows)):
        rows.execute("DELETE FROM names WHERE name = ?", (record.name,))
        return
    rows.execute(
        "INSERT OR REPLACE INTO names VALUES (?, ?, ?)",
        (record.name, record.serial, msgspec.json.encode(record)),
    )
    if not record.is_unloaded:
        return
    rows.execute("INSERT INTO unloaded VALUES (?, ?)", (record.serial, record.name))
    (count,) = rows.execute("SELECT count(*) FROM unloaded").fetchone()
    if count > MAX_UNLOADED:
        _forget_first_unloaded(rows)


def _forget_first_unloaded(rows: sqlite3.Connection) -> None:
    serial, name = rows.execute(
        "SELECT serial, name FROM unloaded ORDER BY serial LIMIT 1"
    ).fetchone()
    rows.execute("DELETE FROM unloaded WHERE serial = ?", (serial,))
    record = _record(rows, name)
    if record is None or record.serial != serial:  # an earlier release has changed it since
        return
    rows.execute("DELETE FROM names WHERE name = ?", (name,))
    if record.generation > _first_generation(rows):
        rows.execute("DELETE FROM forgotten")
        rows.execute("INSERT INTO forgotten VALUES (?)", (record.generation,))


def _append(
    rows: sqlite3.Connection,
    *,
    record: Record | None = None,
    joined: Member | None = None,
    left: str | None = None,
) -> Change:
    """Give a change the next serial, and forget the oldest one beyond MAX_CHANGES."""
    previous = _serial(rows)
    serial = previous + 1
    if record is not None:
        record = msgspec.structs.replace(record, serial=serial)
    change = Change(serial=serial, previous=previous, record=record, joined=joined, left=left)
    rows.execute("UPDATE meta SET serial = ?", (serial,))
    rows.execute("INSERT INTO changes VALUES (?, ?)", (serial, msgspec.json.encode(change)))
    rows.execute("DELETE FROM changes WHERE serial <= ?", (serial - MAX_CHANGES,))
    return change


def _count_report(rows: sqlite3.Connection) -> None:
    rows.execute("UPDATE meta SET reports = reports + 1")
