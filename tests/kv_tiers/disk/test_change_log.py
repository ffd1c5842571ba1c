from __future__ import annotations

import errno
import io
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_serve.folders.folder import Folder, OpenFolder
from lora_serve.kv_tiers.disk import change_log
from lora_serve.kv_tiers.disk.change_log import EDITION_BYTES, ChangeLog, Place
from tests.fakes.full_disk import no_room_beyond

ROOT = b"r" * 32
HERE, THERE = Place(ROOT, "here.kv"), Place(ROOT, "there.kv")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "staging" / "writer"


@pytest.fixture
def one(tmp_path: Path) -> ChangeLog:
    return ChangeLog(opening(tmp_path))


@pytest.fixture
def two(tmp_path: Path) -> ChangeLog:
    return ChangeLog(opening(tmp_path))


def opening(path: Path) -> OpenFolder:
    def open_folder(name: str, *, make: bool = False) -> Folder:
        with Folder.at(path) as folder:
            return folder.make_folder(name) if make else folder.folder(name)

    return open_folder


def heard(log: ChangeLog, *told: Place) -> list[Place] | None:
    """What a process hears at the begin of a turn in which it announces this."""
    with log.turn() as turn:
        if told:
            turn.tell(told)
        return None if turn.changes is None else list(turn.changes)


def acquaint(*everyone: ChangeLog) -> None:
    for log in everyone:
        assert heard(log, THERE) is None, "what was before its time is not known"
    for log in everyone:
        heard(log)


def test_what_one_tells_the_others_hear_once(one: ChangeLog, two: ChangeLog) -> None:
    acquaint(one, two)
    assert heard(one, HERE, THERE) == []
    assert heard(two) == [HERE, THERE]
    assert heard(two) == []
    assert heard(one) == [], "its own is no change of others"


def test_what_is_told_out_of_turn_is_heard_by_all(one: ChangeLog, two: ChangeLog) -> None:
    acquaint(one, two)
    with two.turn():
        one.tell(Place(ROOT))
    assert heard(one, HERE) == [Place(ROOT)]
    assert heard(two) == [Place(ROOT), HERE]


def test_what_is_told_during_a_turn_is_not_missed(one: ChangeLog, two: ChangeLog) -> None:
    acquaint(one, two)
    with two.turn() as turn:
        one.tell(THERE)
        turn.tell([HERE])
    assert THERE in (heard(two) or ())


def test_telling_before_anybody_writes_is_no_error(one: ChangeLog, path: Path) -> None:
    one.tell(HERE)
    assert not path.exists()


def test_a_turn_that_fails_has_heard_nothing(one: ChangeLog, two: ChangeLog) -> None:
    acquaint(one, two)
    heard(one, HERE)
    with pytest.raises(OSError, match="no"), two.turn():
        raise OSError("no")
    assert heard(two) is None
    assert heard(two) == []


def test_changes_that_could_not_be_read_are_not_passed_over(
    one: ChangeLog, two: ChangeLog, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquaint(one, two)
    heard(one, HERE, HERE)
    heard(two)
    path.write_bytes(b"")  # a new edition begins, shorter than what has been read of the old one
    heard(one, HERE)

    class BrokenBehindTheEdition(io.FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if size == -1:
                raise OSError(errno.EIO, "a bad sector")
            return super().read(size)

    with monkeypatch.context() as broken:
        broken.setattr(io, "FileIO", BrokenBehindTheEdition)
        with pytest.raises(OSError, match="a bad sector"):
            heard(two)
    assert heard(two) is None


def test_an_edition_that_is_long_ends(
    one: ChangeLog, two: ChangeLog, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_log, "MAX_BYTES", 1000)
    acquaint(one, two)
    unheard = 0
    for _ in range(100):
        heard(one, HERE)
        changes = heard(two)
        assert changes in ([HERE], None)
        unheard += changes is None
        assert path.stat().st_size < 1200
    assert 1 <= unheard < 20


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: b"",
        lambda text: text[: EDITION_BYTES // 2],
        lambda text: b"an id of sixteen",
        lambda text: text[EDITION_BYTES:],
        lambda text: text[:-50] + b"\n",
        lambda text: text + b"nothing of ours\n",
        lambda text: text + b"\n" + ROOT.hex().encode() + b" ../../elsewhere.kv\n",
        lambda text: text + b"\n \n",
        lambda text: text + b"\xff\xff \xff\n",
    ],
    ids=["empty", "cut", "older", "headless", "torn", "foreign", "elsewhere", "nowhere", "garbled"],
)
def test_where_changes_may_be_lost_each_process_looks_everywhere_once(
    one: ChangeLog, two: ChangeLog, path: Path, damage: Callable[[bytes], bytes]
) -> None:
    acquaint(one, two)
    heard(one, HERE)
    path.write_bytes(damage(path.read_bytes()))
    assert heard(two, THERE) is None
    assert heard(two) == []
    assert heard(one) in (None, [THERE]), "what was damaged it had heard, or announced"
    assert heard(one, HERE) == []
    assert heard(two) == [HERE]


@pytest.mark.parametrize("num_bytes_left", [0, 40])
def test_what_could_not_be_announced_makes_each_process_look_everywhere(
    one: ChangeLog, two: ChangeLog, path: Path, num_bytes_left: int
) -> None:
    acquaint(one, two)
    with no_room_beyond(path.stat().st_size + num_bytes_left):
        heard(one, HERE)
    assert heard(two) is None
