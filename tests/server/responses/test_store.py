from __future__ import annotations

import pytest

from lora_serve.errors import InvalidRequestError, NotFoundError, OverloadedError
from lora_serve.server.responses.items import ITEM_BYTES, TextItem
from lora_serve.server.responses.store import MAX_RUNNING, StoredResponses


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def kept(store: StoredResponses, tenant: str, ids: str) -> str:
    """The ids of these that are still there."""
    found = ""
    for response_id in ids:
        try:
            store.get(tenant, response_id)
        except NotFoundError:
            continue
        found += response_id
    return found


def put(store: StoredResponses, tenant: str, response_id: str, status: str = "completed") -> None:
    store.put(tenant, response_id, status, b"{}", [TextItem("user", "x")])


def test_the_oldest_make_room_for_others() -> None:
    store = StoredResponses(2, 10**6, 60.0)
    for response_id in "abc":
        put(store, "me", response_id)
    assert kept(store, "me", "abc") == "bc"


def test_a_key_that_keeps_much_pushes_out_its_own() -> None:
    store = StoredResponses(4, 10**6, 60.0)
    put(store, "you", "a")
    for response_id in "bcdefg":
        put(store, "me", response_id)
    assert kept(store, "you", "a") == "a"
    assert kept(store, "me", "bcdefg") == "efg"


def test_their_bytes_are_bounded_with_those_of_the_conversation() -> None:
    size = ITEM_BYTES + len("{}") + len("x")
    store = StoredResponses(100, 2 * size, 60.0)
    for response_id in "abc":
        put(store, "me", response_id)
    assert kept(store, "me", "abc") == "bc"
    store.update("me", "c", "completed", b" " * size)
    assert kept(store, "me", "abc") == "c"
    store.update("me", "c", "completed", b" " * 2 * size)
    assert kept(store, "me", "abc") == ""  # alone it is too large


def put_bytes(
    store: StoredResponses, tenant: str, response_id: str, size: int, status: str = "completed"
) -> None:
    store.put(tenant, response_id, status, b" " * size, ())


def test_a_key_that_keeps_large_ones_pushes_out_its_own() -> None:
    store = StoredResponses(100, 1000, 60.0)
    for response_id in "abc":
        put_bytes(store, "you", response_id, 100)
    for response_id in "def":
        put_bytes(store, "me", response_id, 400)
    assert kept(store, "you", "abc") == "abc"
    assert kept(store, "me", "def") == "f"


def test_what_is_larger_than_the_bound_is_not_kept_and_pushes_out_none() -> None:
    store = StoredResponses(100, 1000, 60.0)
    put_bytes(store, "you", "a", 100)
    put_bytes(store, "me", "b", 1001)
    put_bytes(store, "me", "c", 50, "in_progress")
    store.update("me", "c", "completed", b" " * 1001)
    assert kept(store, "you", "a") == "a"
    assert kept(store, "me", "bc") == ""


def test_what_runs_takes_no_bytes_of_keys_that_have_less() -> None:
    store = StoredResponses(100, 1000, 60.0)
    put_bytes(store, "you", "a", 400)
    put_bytes(store, "me", "b", 400, "queued")
    with pytest.raises(OverloadedError, match="would take 800 bytes"):
        put_bytes(store, "me", "c", 400, "queued")
    with pytest.raises(InvalidRequestError, match="--max-stored-response-bytes 1000"):
        put_bytes(store, "me", "d", 1001, "queued")
    assert kept(store, "you", "a") == "a"
    assert kept(store, "me", "bcd") == "b"


def test_a_response_takes_the_place_of_one_that_ended_with_the_same_id() -> None:
    store = StoredResponses(2, 1000, 60.0)
    put_bytes(store, "me", "a", 900)
    put_bytes(store, "me", "a", 800)
    put_bytes(store, "me", "b", 200, "queued")
    assert kept(store, "me", "ab") == "ab"
    with pytest.raises(InvalidRequestError, match="still runs"):
        store.check_id("me", "b")
    store.check_id("you", "b")


def test_each_is_kept_for_a_time_from_its_end_on() -> None:
    clock = Clock()
    store = StoredResponses(100, 10**6, 60.0, clock)
    put(store, "me", "a")
    put(store, "me", "b", "queued")
    clock.now = 59.0
    assert kept(store, "me", "ab") == "ab"
    clock.now = 60.0
    assert kept(store, "me", "ab") == "b"  # it runs
    store.update("me", "b", "completed", b"{}")
    clock.now = 119.0
    assert kept(store, "me", "ab") == "b"
    clock.now = 120.0
    assert kept(store, "me", "ab") == ""


def test_what_runs_makes_no_room_and_is_bounded() -> None:
    store = StoredResponses(2, 10**6, 60.0)
    put(store, "me", "a", "queued")
    put(store, "you", "b", "in_progress")
    with pytest.raises(OverloadedError, match="--max-stored-responses 2 run"):
        put(store, "you", "c", "queued")
    put(store, "me", "d")
    assert kept(store, "me", "ad") == "a"
    store = StoredResponses(1000, 10**6, 60.0)
    for number in range(MAX_RUNNING):
        put(store, "me", str(number), "queued")
    with pytest.raises(OverloadedError, match="of this API key"):
        put(store, "me", "one more", "queued")
    put(store, "you", "a", "queued")


def test_what_was_deleted_meanwhile_stays_away() -> None:
    store = StoredResponses(2, 10**6, 60.0)
    put(store, "me", "a", "in_progress")
    store.delete("me", "a")
    store.update("me", "a", "completed", b"{}")
    assert kept(store, "me", "a") == ""
    with pytest.raises(NotFoundError):
        store.delete("me", "a")
