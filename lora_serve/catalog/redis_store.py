"""A catalog in Redis or Valkey, which servers of many machines share, through its client library.

    lora-serve:catalog:1:{NAME}:meta      hash: serial, run, base, changed, number of reports, the
                                          generation with which names without a record begin
    …:names                               hash: name → serial and record
    …:unloaded                            sorted set of the names that were unloaded, by serial
    …:changes                             stream of the last changes; an entry's id is its serial
    …:replicas, …:heard                   hashes: id → member and report; id → when last heard from
    …:reports                             stream whose entries wake those who wait for reports

No key expires, so no maxmemory-policy but those of allkeys-… ever evicts one. What is watched is a
stream read with BLOCK. All clocks are the server's. Its answers are not trusted to be well-formed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec
import redis

from lora_serve.catalog import redis_scripts as scripts
from lora_serve.catalog.records import (
    MAX_NUMBER,
    Change,
    Member,
    Record,
    Report,
    Snapshot,
    Standing,
)
from lora_serve.errors import CatalogRefusedError, CatalogUnavailableError
from lora_serve.redis_client import open_redis, reason_of

TIMEOUT_SECONDS = 5.0
MAX_ANSWER_BYTES = 64 * 2**20  # all records of 100,000 names, with paths of 400 characters
_KEYS = ("meta", "names", "changes", "replicas", "heard", "reports", "unloaded")
_RUN_CHECK_SECONDS = 2.0  # while nothing comes, the server is asked whether it is still the same


class RedisStore:
    """Connects when first used. name: of the catalog, of which a server may have several."""

    def __init__(
        self,
        url: str,
        name: str,
        password: str | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        """Raises ConfigError for a URL that names no server."""
        parts = urlsplit(url)
        self._where = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        self._redis = open_redis(
            "--lora-catalog",
            url,
            password,
            timeout_seconds,
            MAX_ANSWER_BYTES,
            max_answer_seconds=3 * timeout_seconds,  # after it the caller waits no longer
        )
        prefix = f"lora-serve:catalog:1:{{{name}}}:"
        self._keys = [prefix + key for key in _KEYS]
        self._timeout_seconds = timeout_seconds
        self._changes, self._reports = prefix + "changes", prefix + "reports"
        self._checked = 0.0
        self._run_id = b""  # of the server that was last agreed with

    @property
    def where(self) -> str:
        return self._where

    def ping(self) -> None:
        with self._errors():
            self._redis.ping()

    # ── names ───────────────────────────────────────────────────────────────────────────────

    def snapshot(self) -> Snapshot:
        with self._errors():
            serial, records, replicas, first_generation = self._run(scripts.SNAPSHOT)
            found = sorted((_record(text) for text in records), key=lambda record: record.serial)
            members = sorted((_entry(text)[0] for text in replicas), key=lambda m: m.replica_id)
            return Snapshot(
                serial=_number(serial),
                first_generation=_number(first_generation),
                records=tuple(found),
                members=tuple(members),
            )

    def changes(self, since: int, seconds: float) -> list[Change]:
        with self._errors():
            entries = self._read(self._changes, since, seconds)
            now = time.monotonic()
            if entries or now - self._checked > _RUN_CHECK_SECONDS:
                self._run(scripts.CHECK)  # else they may be another run's, which has lost some
                self._checked = now
            return [_change(number, fields) for number, fields in entries]

    def get(self, name: str) -> Record | None:
        with self._errors():
            text, told = self._run(scripts.GET, name)
            if text is None and (first := _number(told)):
                return Record(name=name, generation=first)
            return None if text is None else _record(text)

    def put(self, record: Record, expected: int) -> Record | None:
        generation = "" if record.is_module else record.generation
        body = msgspec.json.encode(msgspec.structs.replace(record, serial=0))
        with self._errors():
            serial = self._run(
                scripts.PUT, record.name, expected, body, int(record.is_unloaded), generation
            )
            if serial is None:
                return None
            return msgspec.structs.replace(record, serial=_number(serial))

    # ── replicas ────────────────────────────────────────────────────────────────────────────

    def join(self, member: Member) -> None:
        with self._errors():
            self._run(scripts.JOIN, member.replica_id, msgspec.json.encode(member))

    def renew(self, member: Member, report: Report) -> Member | None:
        texts = msgspec.json.encode(member), msgspec.json.encode(report)
        with self._errors():
            found = self._run(scripts.RENEW, member.replica_id, *texts)
            return None if found is None else msgspec.json.decode(found, type=Member)

    def leave(self, replica_id: str, incarnation: str | None = None) -> bool:
        with self._errors():
            return bool(self._run(scripts.LEAVE, replica_id, incarnation or ""))

    def standings(self) -> list[Standing]:
        with self._errors():
            now, replicas, heard = self._run(scripts.STANDINGS)
            times = dict(zip(heard[::2], map(float, heard[1::2]), strict=True))
            return [
                Standing(
                    member=member,
                    report=report,
                    silent_seconds=max(0.0, float(now) - times.get(replica_id, 0.0)),
                )
                for replica_id, (member, report) in sorted(
                    zip(replicas[::2], map(_entry, replicas[1::2]), strict=True)
                )
            ]

    def await_reports(self, seen: int, seconds: float) -> int:
        with self._errors():
            entries = self._read(self._reports, max(seen, 0), 0.001 if seen < 0 else seconds)
            return max([max(seen, 0), *(number for number, _ in entries)])

    def restore(self, snapshot: Snapshot) -> None:
        with self._errors():
            run_id, is_wanted = self._run_unguarded(scripts.WANTS, snapshot.serial, self._run_id)
            if is_wanted:
                run_id = self._run_unguarded(scripts.RESTORE, *_restored(snapshot))
            self._run_id = run_id

    def close(self) -> None:
        self._redis.close()

    # ── the server ──────────────────────────────────────────────────────────────────────────

    def _run(self, script: str, *arguments: object) -> Any:
        return self._run_unguarded(script, *arguments, self._run_id)

    def _run_unguarded(self, script: str, *arguments: object) -> Any:
        return self._redis.register_script(script)(self._keys, arguments)

    def _read(
        self, stream: str, since: int, seconds: float
    ) -> list[tuple[int, dict[bytes, bytes]]]:
        """The entries of a stream after `since`; waits for the first, less long than for others."""
        block = min(seconds, self._timeout_seconds / 2)
        found = self._redis.xread({stream: f"{since}-0"}, block=max(1, round(block * 1000)))
        entries: Sequence[Any] = found[0][1] if found else ()
        return [(_number(number.partition(b"-")[0]), fields) for number, fields in entries]

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Other errors than redis-py's own come of what is not a catalog's."""
        try:
            yield
        except (redis.RedisError, OSError, *_OF_GARBAGE) as error:
            self._checked = 0.0
            reason = reason_of(error)
            if scripts.ANEW in reason:
                reason = "it was started anew, and no server has told it yet what it may have lost"
            kind = CatalogRefusedError if isinstance(error, _REFUSALS) else CatalogUnavailableError
            raise kind(f"the catalog at {self._where}: {reason}") from error


# What is raised where an answer of another type, or of other parts, is taken for a catalog's.
_OF_GARBAGE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

# Of these a command, and each of a script, is told before it writes anything.
_REFUSALS = (
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.NoPermissionError,
    redis.exceptions.AuthenticationError,
)


def _record(text: bytes) -> Record:
    serial, _, body = text.partition(b" ")
    return msgspec.structs.replace(msgspec.json.decode(body, type=Record), serial=_number(serial))


def _number(text: bytes) -> int:
    """A serial or generation. Raises ValueError where no catalog has written it."""
    if not text.isdigit() or len(text) > len(str(MAX_NUMBER)) or int(text) >= MAX_NUMBER:
        raise ValueError(f"{text[:20].decode(errors='replace')} {scripts.NO_NUMBER}")
    return int(text)


def _restored(snapshot: Snapshot) -> list[object]:
    """The arguments of RESTORE."""
    names = [_stored(record) for record in snapshot.records]
    members = [(m.replica_id, msgspec.json.encode(m)) for m in snapshot.members]
    parts = [part for each in (*names, *members) for part in each]
    return [snapshot.serial, snapshot.first_generation, len(names), len(members), *parts]


def _stored(record: Record) -> tuple[str, bytes, int | str]:
    body = msgspec.json.encode(msgspec.structs.replace(record, serial=0))
    since = record.serial if record.is_unloaded else ""
    return record.name, b"%d %b" % (record.serial, body), since


def _entry(text: bytes) -> tuple[Member, Report]:
    member, report = msgspec.json.decode(text, type=tuple[str, str])
    known = msgspec.json.decode(report, type=Report) if report else Report()
    return msgspec.json.decode(member, type=Member), known


def _change(serial: int, fields: dict[bytes, bytes]) -> Change:
    previous, kind, body = _number(fields[b"previous"]), fields[b"kind"], fields[b"body"]
    match kind:
        case b"record":
            record = msgspec.structs.replace(msgspec.json.decode(body, type=Record), serial=serial)
            return Change(serial=serial, previous=previous, record=record)
        case b"joined":
            member = msgspec.json.decode(body, type=Member)
            return Change(serial=serial, previous=previous, joined=member)
        case b"left":
            return Change(serial=serial, previous=previous, left=body.decode())
    # after what was restored, everything is to be read anew: no one has seen this one before it
    return Change(serial=serial, previous=serial)
