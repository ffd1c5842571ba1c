from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import SimpleNamespace

import pytest

from lora_serve.catalog.records import Member, Record, Report, Snapshot
from lora_serve.catalog.redis_store import RedisStore
from lora_serve.errors import CatalogRefusedError, CatalogUnavailableError, ConfigError
from tests.catalog.test_base import come_and_gone
from tests.fakes.redis_server import RedisServer

ONE = Member(replica_id="one", address="http://one", incarnation="1")
A = Record(name="a", digest="aa", source="/a")
B = Record(name="b", digest="bb", source="/b")


@pytest.fixture
def pair(catalog_redis: RedisServer) -> Iterator[tuple[RedisStore, RedisStore]]:
    with catalog_redis.client() as client:
        client.flushall()
    stores = RedisStore(catalog_redis.url, "tests"), RedisStore(catalog_redis.url, "tests")
    for store in stores:
        store.restore(Snapshot())
    yield stores
    for store in stores:
        store.close()


def restarted(server: RedisServer) -> None:
    """Kill it: it keeps nothing."""
    server.kill()
    server.start()


def test_a_server_that_lost_all_takes_no_changes_until_it_was_told_what_it_had(
    pair: tuple[RedisStore, RedisStore], catalog_redis: RedisServer
) -> None:
    one, two = pair
    one.join(ONE)
    written = one.put(A, 0)
    assert written is not None
    known = one.snapshot()
    restarted(catalog_redis)
    for ask in (
        lambda: two.put(B, 0),
        lambda: two.renew(ONE, Report()),
        two.snapshot,
        lambda: two.get("a"),
        lambda: two.changes(0, 0.01),
    ):
        with pytest.raises(CatalogUnavailableError):
            ask()
    one.restore(known)
    two.restore(Snapshot())
    restored = two.snapshot()
    assert (restored.records, restored.members) == (known.records, known.members)
    assert restored.serial > known.serial
    again = two.put(B, 0)
    assert again is not None
    assert again.serial > restored.serial


@pytest.mark.usefixtures("two_unloaded_are_kept")
def test_names_that_were_unloaded_stay_so_in_a_server_that_lost_all(
    pair: tuple[RedisStore, RedisStore], catalog_redis: RedisServer
) -> None:
    one, two = pair
    one.join(ONE)
    for name, generation in (("x", 5), ("m", 0), ("n", 0)):
        come_and_gone(one, name, generation=generation, is_module=True)
    known = one.snapshot()
    assert [record.name for record in known.records] == ["m", "n"]
    restarted(catalog_redis)
    one.restore(known)
    two.restore(Snapshot())
    assert two.snapshot().records == known.records
    come_and_gone(two, "o", is_module=True)
    assert [record.name for record in one.snapshot().records] == ["n", "o"]
    assert one.get("m") == Record(name="m", generation=5)


def test_the_replica_that_knows_most_restores_even_if_it_comes_second(
    pair: tuple[RedisStore, RedisStore], catalog_redis: RedisServer
) -> None:
    one, two = pair
    one.join(ONE)
    one.put(A, 0)
    short = two.snapshot()
    one.put(B, 0)
    long = one.snapshot()
    restarted(catalog_redis)
    two.restore(short)
    (adopted,) = two.snapshot().records
    assert adopted.name == "a"
    seen = two.snapshot().serial
    one.restore(long)
    assert one.snapshot().records == long.records
    (change,) = two.changes(seen, 5)
    assert change.previous != seen, "what was restored must be read as a whole"


def test_what_was_changed_since_is_not_taken_back(
    pair: tuple[RedisStore, RedisStore], catalog_redis: RedisServer
) -> None:
    one, two = pair
    short = two.snapshot()
    one.put(A, 0)
    long = one.snapshot()
    restarted(catalog_redis)
    two.restore(short)
    changed = two.put(B, 0)
    assert changed is not None
    one.restore(long)
    assert one.snapshot().records == (changed,)
    assert one.snapshot().serial > long.serial, "no serial of before may be above one of now"


def test_a_full_server_says_so_and_keeps_what_it_has(
    pair: tuple[RedisStore, RedisStore], catalog_redis: RedisServer
) -> None:
    one, _ = pair
    written = one.put(A, 0)
    with catalog_redis.client() as client:
        client.config_set("maxmemory", 1)
        try:
            with pytest.raises(CatalogRefusedError, match="maxmemory"):
                one.put(B, 0)
        finally:
            client.config_set("maxmemory", 0)
    assert one.snapshot().records == (written,)


def test_what_is_no_catalogs_is_an_error_of_the_store(
    pair: tuple[RedisStore, RedisStore], catalog_redis: RedisServer
) -> None:
    one, _ = pair
    one.put(A, 0)
    with catalog_redis.client() as client:
        client.hset("lora-serve:catalog:1:{tests}:names", "a", b"7 {not json")
        with pytest.raises(CatalogUnavailableError, match="the catalog at redis://"):
            one.snapshot()
        client.set("lora-serve:catalog:1:{tests}:names", b"a text")
        with pytest.raises(CatalogUnavailableError):
            one.get("a")


NAMES, META = ("lora-serve:catalog:1:{tests}:" + key for key in ("names", "meta"))


@pytest.mark.parametrize("field", ["serial", "first_generation"])
@pytest.mark.parametrize("forged", ["1e20", str(2**53), "-5", "1.5", "x", "9" * 400])
def test_a_forged_number_changes_nothing_and_is_told_until_the_keys_are_deleted(
    field: str, forged: str, pair: tuple[RedisStore, RedisStore], catalog_redis: RedisServer
) -> None:
    one, two = pair
    one.join(ONE)
    one.put(A, 0)
    known = one.snapshot()
    with catalog_redis.client() as client:
        client.hset(META, field, forged)
        before = client.hgetall(META), client.hgetall(NAMES)
        for ask in (one.snapshot, partial(one.get, "new"), partial(one.put, B, 0)):
            with pytest.raises(CatalogUnavailableError, match=r"below 2\^53.*delete its keys"):
                ask()
        assert (client.hgetall(META), client.hgetall(NAMES)) == before
        client.flushall()
    one.restore(known)
    two.restore(Snapshot())
    assert two.snapshot().records == known.records
    assert two.snapshot().first_generation == 0
    assert two.put(B, 0) is not None


def test_a_servers_own_word_for_a_number_is_bounded_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server need not run the scripts that it is sent."""
    store = RedisStore("redis://127.0.0.1:1", "tests")
    told: list[object] = []
    client = SimpleNamespace(
        register_script=lambda text: lambda keys, arguments: told[0],
        xread=lambda streams, block: told[0],
    )
    monkeypatch.setattr(store, "_redis", client)
    changes = partial(store.changes, 0, 0)
    left = {b"kind": b"left", b"body": b"one"}
    for forged in (b"%d" % 2**53, b"-5", b"1_0", b"", b"9" * 400):
        for ask, answer in (
            (store.snapshot, [forged, [], [], b"0"]),
            (store.snapshot, [b"1", [], [], forged]),
            (store.snapshot, [b"1", [b'%b {"name":"a"}' % forged], [], b"0"]),
            (store.snapshot, [b"1", [b'1 {"name":"a","generation":%b}' % forged], [], b"0"]),
            (partial(store.get, "a"), [None, forged]),
            (partial(store.put, A, 0), forged),
            (changes, [(b"", [(forged + b"-0", {b"previous": b"0", **left})])]),
            (changes, [(b"", [(b"1-0", {b"previous": forged, **left})])]),
        ):
            told[:] = [answer]
            with pytest.raises(CatalogUnavailableError):
                ask()


def test_a_serial_that_was_forged_near_the_end_spoils_no_fresh_server(
    pair: tuple[RedisStore, RedisStore], catalog_redis: RedisServer
) -> None:
    restarted(catalog_redis)
    with pytest.raises(CatalogUnavailableError, match="start all servers anew"):
        pair[0].restore(Snapshot(serial=2**53 - 1, first_generation=7))
    with catalog_redis.client() as client:
        assert client.dbsize() == 0
    pair[0].restore(Snapshot(serial=5))
    assert pair[0].put(A, 0) is not None
    with catalog_redis.client() as client:
        client.hset(META, "serial", 2**53 - 1)
    with pytest.raises(CatalogUnavailableError, match="delete its keys"):
        pair[0].put(B, 0)


@pytest.mark.usefixtures("two_unloaded_are_kept")
@pytest.mark.parametrize(
    "body", [b'{"name":"x"}', b"{", b"", b"7", b'{"generation":"x"}', b'{"generation":1e300}']
)
def test_a_forged_record_of_an_unloaded_name_is_forgotten_as_any_other(
    body: bytes, pair: tuple[RedisStore, RedisStore], catalog_redis: RedisServer
) -> None:
    one, _ = pair
    come_and_gone(one, "x", is_module=True)
    come_and_gone(one, "y", is_module=True)
    with catalog_redis.client() as client:
        serial = client.hget(NAMES, "x").partition(b" ")[0]
        client.hset(NAMES, "x", serial + b" " + body)
    gone = come_and_gone(one, "z", is_module=True)
    assert [record.name for record in one.snapshot().records] == ["y", "z"]
    assert one.get("z") == gone
    assert one.snapshot().first_generation == 0


def test_a_change_that_fails_on_its_way_counts_as_one(
    pair: tuple[RedisStore, RedisStore], catalog_redis: RedisServer
) -> None:
    """Others have been told of it: what a server knew before must not replace it."""
    one, _ = pair
    with catalog_redis.client() as client:
        client.set("lora-serve:catalog:1:{tests}:unloaded", "a text")
        with pytest.raises(CatalogUnavailableError, match="WRONGTYPE"):
            one.put(A, 0)
        assert client.hget(META, "changed") == b"1"


def test_a_serial_that_is_written_otherwise_is_the_same_serial(
    pair: tuple[RedisStore, RedisStore], catalog_redis: RedisServer
) -> None:
    with catalog_redis.client() as client:
        client.hset(NAMES, "a", b'07 {"name":"a","digest":"aa","source":"/a"}')
    found = pair[0].get("a")
    assert found is not None
    assert found.serial == 7
    assert pair[0].put(A, 6) is None
    assert pair[0].put(A, 7) is not None


GARBAGE = (7, None, -1.5, b"x", b"\xff", [], {}, [[]], [7, 7, 7], [b"1", 7, [7]], [b"1", [7], [7]],
    [b"1", [b"9" * 400 + b" {}"], []], [b"1", [b"1 " + b"[" * 9000], []], [b"inf", [], []],
    [(b"s", [(7, {})])], [(b"s", [(b"1-0", None)])], [(b"s", [(b"1-0", {b"kind": 7})])],
    [(b"s", 7)], [b"1", {b"a": 7}, [b"a", b"nan"]], (b"1", [b"a", b'["{}",""]'], [b"a", b"x"]),
)  # fmt: skip


@pytest.mark.parametrize("answer", GARBAGE, ids=lambda answer: repr(answer)[:30])
def test_whatever_a_server_answers_is_taken_or_is_an_error_of_the_store(
    answer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of another kind, or one that somebody has taken over."""
    store = RedisStore("redis://127.0.0.1:1", "tests")
    client = SimpleNamespace(
        register_script=lambda text: lambda keys, arguments: answer,
        xread=lambda streams, block: answer,
        ping=lambda: answer,
    )
    monkeypatch.setattr(store, "_redis", client)
    for call in (
        store.snapshot,
        partial(store.changes, 0, 0.0),
        partial(store.get, "a"),
        partial(store.put, A, 0),
        partial(store.join, ONE),
        partial(store.renew, ONE, Report()),
        partial(store.leave, "one"),
        store.standings,
        partial(store.await_reports, 0, 0.0),
        partial(store.restore, Snapshot()),
    ):
        with suppress(CatalogUnavailableError):
            call()


def test_catalogs_of_two_names_do_not_meet(
    pair: tuple[RedisStore, RedisStore], catalog_redis: RedisServer
) -> None:
    other = RedisStore(catalog_redis.url, "others")
    other.restore(Snapshot())
    pair[0].put(A, 0)
    assert other.snapshot().records == ()
    other.close()


def test_no_message_has_the_password() -> None:
    store = RedisStore("redis://:secret@127.0.0.1:1/0", "tests", timeout_seconds=1)
    with pytest.raises(CatalogUnavailableError) as caught:
        store.ping()
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="--lora-catalog-password-file"):
        RedisStore("redis://:secret@127.0.0.1:1/0", "tests", "another")


@pytest.mark.parametrize("password", ["/secret", "12/secret", "?secret", "#secret"])
def test_a_password_whose_signs_end_a_servers_name_is_refused_and_not_told(password: str) -> None:
    with pytest.raises(ConfigError, match="has an @ behind its server's name; if that") as caught:
        RedisStore(f"redis://:{password}@127.0.0.1:1/0", "tests")
    assert "secret" not in str(caught.value)
