from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from lora_serve.distributed.limits import TimeLimit
from lora_serve.distributed.link import Link, new_link
from lora_serve.errors import RankLostError

LIMIT = TimeLimit(60.0)
LARGE = bytes(range(256)) * 8192  # more than a socket holds


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    one, socket = new_link("rank 1")
    other = Link(socket, "rank 0")
    yield one, other
    one.close()
    other.close()


def test_messages_come_whole_and_in_their_order(ends: tuple[Link, Link]) -> None:
    one, other = ends
    sender = threading.Thread(
        target=lambda: [one.send(b"", limit=LIMIT), one.send(LARGE, b"end", limit=LIMIT)]
    )
    sender.start()
    assert [bytes(other.receive(LIMIT)) for _ in "12"] == [b"", LARGE + b"end"]
    sender.join()


def test_an_end_that_takes_nothing_is_not_waited_for_for_ever(ends: tuple[Link, Link]) -> None:
    with pytest.raises(RankLostError) as caught:
        ends[0].send(LARGE, limit=TimeLimit(0.1, "--step-timeout"))
    assert str(caught.value) == (
        "rank 1 hangs: it has not answered in 0.1 s; raise --step-timeout if it may take longer"
    )


def test_an_end_that_says_nothing_is_not_waited_for_for_ever(ends: tuple[Link, Link]) -> None:
    with pytest.raises(RankLostError, match=r"^rank 1 hangs: it has not answered in 0.1 s$"):
        ends[0].receive(TimeLimit(0.1))


def test_a_closed_end_is_told_of(ends: tuple[Link, Link]) -> None:
    one, other = ends
    other.close()
    with pytest.raises(RankLostError, match="rank 1 is gone"):
        one.receive(None)
    with pytest.raises(RankLostError, match="rank 1 is gone"):
        one.send(LARGE, limit=LIMIT)
