from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from glob import glob
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import xxhash

from lora_serve.errors import ConfigError
from lora_serve.folders.folder import Folder
from lora_serve.identity import BlockHash
from lora_serve.kv_tiers.base import Cause, Drop, Record, TierError, TierNamespace
from lora_serve.kv_tiers.codec import HEADER_BYTES, record_bytes
from lora_serve.kv_tiers.disk.directory import DiskDirectory
from lora_serve.kv_tiers.disk.group_file import VERSION, write_group
from lora_serve.kv_tiers.disk.tier import MAX_QUARANTINED, DiskTier
from tests.fakes.full_disk import no_room_beyond
from tests.fakes.kv_blocks import a_namespace, chain, content, records
from tests.fakes.kv_files import write_group_file

NS = a_namespace()
HASHES = chain(NS, "a prompt", 24)
MIB = 2**20


class Tiers:
    """Tiers on one directory, closed at the end of the test."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tiers: list[DiskTier] = []

    def open(self, capacity_bytes: int = MIB, **settings: object) -> DiskTier:
        settings = {"poll_seconds": 0.02, **settings}
        tier = DiskTier(self.path, capacity_bytes, **settings)  # type: ignore[arg-type]
        self._tiers.append(tier)
        return tier

    def reopen(self, capacity_bytes: int = MIB) -> DiskTier:
        """Open the tier again, as a restart does."""
        self.close()
        return self.open(capacity_bytes)

    def close(self) -> None:
        for tier in self._tiers:
            tier.close()
        self._tiers = []


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    tiers = Tiers(tmp_path / "kv")
    yield tiers
    tiers.close()


def save(tier: DiskTier, namespace: TierNamespace, hashes: list[BlockHash]) -> None:
    tier.save(namespace, records(namespace, hashes))


def load(
    tier: DiskTier, namespace: TierNamespace, hashes: list[BlockHash]
) -> tuple[int, Cause | None]:
    """How many blocks came, each with the only right bytes, and why no more."""
    done = 0
    while True:
        loaded = tier.load(namespace, hashes[done:])
        for block_hash, record in zip(hashes[done:], loaded.records, strict=False):
            assert record.payload == content(namespace, block_hash)
        done += len(loaded.records)
        if loaded.cause is not None or done == len(hashes):
            return done, loaded.cause


def eventually(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not is_so():
        assert time.monotonic() < deadline, "not within 5 s"
        time.sleep(0.01)


def group_files(path: Path) -> list[Path]:
    return sorted(listed(path, "namespaces/*/*.kv"))


def listed(path: Path, pattern: str) -> list[Path]:
    """What Path.glob gives, but what vanishes meanwhile is no error."""
    return [path / name for name in glob(pattern, root_dir=path)]


def remove_all(path: Path) -> None:
    """Delete a directory in which a tier moves files meanwhile."""
    while path.exists():
        shutil.rmtree(path, ignore_errors=True)


def quarantined(path: Path) -> list[Path]:
    place = path / "quarantine"
    return list(place.iterdir()) if place.is_dir() else []


# ── the plain life ──────────────────────────────────────────────────────────────────────────


def test_blocks_survive_a_restart_without_a_clean_end(tiers: Tiers) -> None:
    save(tiers.open(), NS, HASHES)
    second = tiers.open()  # the first is still there, as if it had been killed
    assert load(second, NS, HASHES) == (24, None)


def test_a_load_begins_and_ends_anywhere_in_a_chain(tiers: Tiers) -> None:
    tier = tiers.open()
    save(tier, NS, HASHES[:10])
    save(tier, NS, HASHES[10:20])
    assert load(tier, NS, HASHES[3:15]) == (12, None)
    assert load(tier, NS, HASHES) == (20, Cause.ABSENT)
    assert load(tier, NS, HASHES[20:]) == (0, Cause.ABSENT)


def test_blocks_of_interleaved_chains_are_found_in_one_file(tiers: Tiers) -> None:
    tier = tiers.open()
    others = chain(NS, "another prompt", 24)
    mixed = [block_hash for pair in zip(HASHES, others, strict=True) for block_hash in pair]
    save(tier, NS, mixed)
    assert len(group_files(tiers.path)) == 1
    assert load(tier, NS, HASHES) == (24, None)
    assert load(tier, NS, others) == (24, None)


def test_blocks_that_are_there_are_not_written_again(tiers: Tiers) -> None:
    tier = tiers.open()
    assert tier.save(NS, records(NS, HASHES[:10])) == 10
    assert tier.save(NS, records(NS, HASHES)) == 14
    assert tier.save(NS, records(NS, HASHES)) == 0
    assert tier.contents().num_blocks == 24


def test_nothing_else_in_the_directory_is_touched(tiers: Tiers) -> None:
    tiers.path.mkdir()
    (tiers.path / "precious").write_text("data")
    tier = tiers.open()
    save(tier, NS, HASHES)
    tier.drop(Drop(b"model"))
    assert (tiers.path / "precious").read_text() == "data"


def test_a_path_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--kv-disk-path .*/file: .*; name a directory"):
        DiskTier(tmp_path / "file", MIB)


# ── the bound ───────────────────────────────────────────────────────────────────────────────


def test_the_bound_holds_far_below_the_working_set(tiers: Tiers) -> None:
    bound = 80 * record_bytes(NS)
    tier = tiers.open(bound)
    chains = [chain(NS, f"p{i}", 8) for i in range(50)]
    for hashes in chains:
        save(tier, NS, hashes)
        used = sum(file.stat().st_size for file in tiers.path.glob("*/*/*.kv"))
        assert used == tier.contents().num_bytes <= bound
    assert load(tier, NS, chains[-1]) == (8, None)
    assert load(tier, NS, chains[0]) == (0, Cause.ABSENT)
    assert tier.contents().num_evicted == 8 * 50 - tier.contents().num_blocks


def test_the_least_recently_used_file_goes_first_also_after_a_restart(tiers: Tiers) -> None:
    bound = 80 * record_bytes(NS)
    first, second = chain(NS, "first", 8), chain(NS, "second", 8)
    tier = tiers.open(bound)
    save(tier, NS, first)
    save(tier, NS, second)
    now = time.time()
    for i, file in enumerate(group_files(tiers.path)):  # written long ago, in this order
        os.utime(file, (now - 1000 + i, now - 1000 + i))
    tier = tiers.reopen(bound)
    eventually(lambda: tier.contents().num_blocks == 16)
    old, recent = (first, second) if load_order(tiers.path, first) else (second, first)
    assert load(tier, NS, old) == (8, None)
    tier = tiers.reopen(bound)
    for i in range(7):
        save(tier, NS, chain(NS, f"more {i}", 8))
    assert load(tier, NS, old) == (8, None)
    assert load(tier, NS, recent) == (0, Cause.ABSENT)


def load_order(path: Path, hashes: list[BlockHash]) -> bool:
    """Whether the file with these blocks is the first in the directory."""
    return hashes[0] in group_files(path)[0].read_bytes()


def test_a_file_that_another_process_uses_is_not_the_oldest(tiers: Tiers) -> None:
    bound = 80 * record_bytes(NS)
    used, unused = chain(NS, "used", 8), chain(NS, "unused", 8)
    tier = tiers.open(bound)
    save(tier, NS, used)
    save(tier, NS, unused)
    file = next(f for f in group_files(tiers.path) if used[0] in f.read_bytes())
    later = time.time() + 600
    os.utime(file, (later, later))
    for i in range(8):
        save(tier, NS, chain(NS, f"more {i}", 8))
    assert load(tier, NS, used) == (8, None)
    assert load(tier, NS, unused) == (0, Cause.ABSENT)


def test_a_namespace_without_files_leaves_no_directory(tiers: Tiers) -> None:
    tier = tiers.open(80 * record_bytes(NS))
    save(tier, NS, HASHES[:8])
    other = a_namespace("m")
    for i in range(12):
        save(tier, other, chain(other, f"p{i}", 8))
    eventually(
        lambda: [d.name for d in (tiers.path / "namespaces").iterdir()] == [other.root.hex()]
    )


def test_a_block_too_large_for_the_bound_is_an_error_of_the_tier(tiers: Tiers) -> None:
    tier = tiers.open(4 * record_bytes(NS))
    with pytest.raises(TierError, match="too large for the bound"):
        save(tier, NS, HASHES)


# ── dropping ────────────────────────────────────────────────────────────────────────────────


def test_dropping_an_adapter_takes_its_namespaces_whatever_process_wrote_them(tiers: Tiers) -> None:
    tier = tiers.open()
    spaces = [a_namespace("n", "A"), a_namespace("n", "A", salt="s"), a_namespace("n", "B"),
              a_namespace("m", "A"), a_namespace("")]  # fmt: skip
    for space in spaces:
        save(tier, space, chain(space, "p", 4))
    other = tiers.open()
    other.drop(Drop(b"model", "n", (spaces[2].digest, 0)))

    def counts(tier: DiskTier) -> list[int]:
        return [load(tier, space, chain(space, "p", 4))[0] for space in spaces]

    assert counts(other) == [0, 0, 4, 4, 4]
    assert counts(tiers.reopen()) == [0, 0, 4, 4, 4]
    eventually(lambda: not list((tiers.path / "trash").iterdir()))


def test_what_another_model_has_stored_is_not_erased_by_a_drop(tiers: Tiers) -> None:
    tier, other = tiers.open(), a_namespace("n", model=b"another")
    for space in (NS, other):
        save(tier, space, chain(space, "p", 4))
    tier.drop(Drop(b"model", "n"))
    tier.drop(Drop(b"model"))
    assert load(tier, NS, chain(NS, "p", 4)) == (0, Cause.ABSENT)
    assert load(tier, other, chain(other, "p", 4)) == (4, None)


def test_what_is_dropped_by_another_process_is_a_miss(tiers: Tiers) -> None:
    tier = tiers.open()
    save(tier, NS, HASHES)
    tiers.open().drop(Drop(b"model"))
    assert load(tier, NS, HASHES) == (0, Cause.ABSENT)
    save(tier, NS, HASHES)
    assert load(tier, NS, HASHES) == (24, None)


def test_a_namespace_whose_descriptor_cannot_be_read_is_set_aside(tiers: Tiers) -> None:
    save(tiers.open(), NS, HASHES)
    tiers.close()
    (descriptor,) = tiers.path.glob("namespaces/*/namespace.json")
    descriptor.write_bytes(descriptor.read_bytes().replace(b'"n"', b'"m"'))
    tier = tiers.reopen()  # else dropping "n" would leave it
    eventually(lambda: tier.contents().quarantined == {"foreign": 1})
    assert group_files(tiers.path) == []
    assert load(tier, NS, HASHES) == (0, Cause.ABSENT)
    assert len(quarantined(tiers.path)) == 1


# ── faults ──────────────────────────────────────────────────────────────────────────────────


def damaged(tiers: Tiers, damage: Callable[[Path], None], *, at_start: bool) -> DiskTier:
    tier = tiers.open()
    save(tier, NS, HASHES)
    (file,) = group_files(tiers.path)
    damage(file)
    return tiers.reopen() if at_start else tier


def flip(offset: int) -> Callable[[Path], None]:
    def act(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[offset] ^= 0x10
        file.write_bytes(data)

    return act


def cut(length: int) -> Callable[[Path], None]:
    def act(file: Path) -> None:
        os.truncate(file, length)

    return act


TABLE_BYTES = 64 + 32 * 24 + 16
DAMAGES = {
    "a flipped bit in the head": flip(3),
    "a flipped bit in the table": flip(100),
    "a flipped bit in a header": flip(TABLE_BYTES + 10),
    "a flipped bit in a block": flip(TABLE_BYTES + 5 * record_bytes(NS) + HEADER_BYTES + 40),
    "a flipped bit in the last byte": flip(-1),
    "an empty file": cut(0),
    "a cut in the table": cut(200),
    "a cut between records": cut(TABLE_BYTES + 4 * record_bytes(NS)),
    "a cut in a record": cut(TABLE_BYTES + 4 * record_bytes(NS) + 300),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("at_start", [False, True])
def test_a_damaged_file_is_never_believed_and_set_aside(
    tiers: Tiers, damage: str, at_start: bool
) -> None:
    tier = damaged(tiers, DAMAGES[damage], at_start=at_start)
    count, cause = load(tier, NS, HASHES)  # checks every byte that comes
    if damage in ("a flipped bit in the head", "a flipped bit in the table") and not at_start:
        assert (count, cause) == (24, None)  # the blocks themselves are whole
        return
    assert count < 24
    assert cause is not None
    eventually(lambda: len(quarantined(tiers.path)) == 1)
    assert load(tier, NS, HASHES) == (0, Cause.ABSENT)
    assert sum(tier.contents().quarantined.values()) == 1
    save(tier, NS, HASHES)
    assert load(tier, NS, HASHES) == (24, None)


@pytest.mark.parametrize("at_start", [False, True])
@pytest.mark.parametrize("same_namespace", [False, True])
def test_files_swapped_with_one_another_give_no_wrong_block(
    tiers: Tiers, at_start: bool, same_namespace: bool
) -> None:
    tier = tiers.open()
    other = NS if same_namespace else a_namespace("m")
    others = chain(other, "another prompt", 24)
    save(tier, NS, HASHES)
    save(tier, other, others)
    one, two = group_files(tiers.path)
    spare = tiers.path / "spare"
    one.rename(spare), two.rename(one), spare.rename(two)
    tier = tiers.reopen() if at_start else tier
    counts = {load(tier, NS, HASHES)[0], load(tier, other, others)[0]}
    assert counts == ({24} if at_start and same_namespace else {0})


def test_a_file_of_another_layout_in_the_namespaces_place_is_refused(tiers: Tiers) -> None:
    tier = tiers.open()
    save(tier, NS, HASHES)
    (file,) = group_files(tiers.path)
    foreign = a_namespace(layout=b"other")
    foreign = TierNamespace(NS.root, b"model", "n", NS.digest, 0, b"", b"other", NS.block_bytes)
    file.unlink()
    write_group_file(file, foreign, records(foreign, HASHES))
    assert load(tier, NS, HASHES) == (0, Cause.LAYOUT)


def test_the_quarantine_is_bounded(tiers: Tiers) -> None:
    tier = tiers.open()
    for i in range(MAX_QUARANTINED + 4):
        hashes = chain(NS, f"p{i}", 2)
        save(tier, NS, hashes)
        file = max(group_files(tiers.path), key=lambda file: file.stat().st_mtime_ns)
        flip(-1)(file)
        assert load(tier, NS, hashes) == (1, Cause.CHECKSUM)
    assert len(quarantined(tiers.path)) == MAX_QUARANTINED
    assert tier.contents().quarantined == {"checksum": MAX_QUARANTINED + 4}


def test_a_full_disk_is_an_error_of_the_tier_and_leaves_nothing_behind(tiers: Tiers) -> None:
    def full(file: int, namespace: TierNamespace, some: Sequence[Record]) -> int:
        os.write(file, b"half of it")
        raise OSError(28, "No space left on device")

    save(tiers.open(), NS, HASHES[:8])
    tier = tiers.open(write=full)
    with pytest.raises(TierError, match="No space left on device"):
        save(tier, NS, HASHES)
    assert load(tier, NS, HASHES) == (8, Cause.ABSENT)
    assert len(group_files(tiers.path)) == 1
    assert [f.name for f in tiers.path.glob("staging/*/*") if f.name != "lock"] == []


def test_a_write_that_ends_half_way_leaves_nothing_behind(tiers: Tiers) -> None:
    tier = tiers.open()
    save(tier, NS, HASHES[:8])
    with no_room_beyond(4096), pytest.raises(TierError, match="File too large"):
        save(tier, NS, HASHES)
    assert load(tier, NS, HASHES) == (8, Cause.ABSENT)
    assert [f.name for f in tiers.path.glob("staging/*/*") if f.name != "lock"] == []
    save(tier, NS, HASHES)
    assert load(tier, NS, HASHES) == (24, None)


def test_a_directory_that_cannot_be_written_still_gives_what_it_has(tiers: Tiers) -> None:
    save(tiers.open(), NS, HASHES[:8])
    tiers.close()
    shutil.rmtree(tiers.path / "staging")
    (tiers.path / "staging").write_text("")  # also for root, nothing can be made here
    tier = tiers.open()
    with pytest.raises(TierError, match="writing to"):
        save(tier, NS, HASHES)
    assert load(tier, NS, HASHES) == (8, Cause.ABSENT)


def test_a_disk_that_was_unmounted_is_not_written_to(tiers: Tiers, tmp_path: Path) -> None:
    elsewhere = Path("/dev/shm")  # another device than the tests' directory
    if elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("there is only one device here")
    tier = tiers.open()
    save(tier, NS, HASHES)
    tiers.path.rename(tmp_path / "mounted")
    with TemporaryDirectory(dir=elsewhere) as other:
        tiers.path.symlink_to(other)
        with pytest.raises(TierError, match="the directory of the start is not here"):
            save(tier, NS, chain(NS, "others", 4))
        assert list(Path(other).iterdir()) == []
        tiers.path.unlink()
    (tmp_path / "mounted").rename(tiers.path)
    assert load(tier, NS, HASHES) == (24, None)


def test_what_was_moved_away_is_not_forgotten_until_it_is_back(
    tiers: Tiers, tmp_path: Path
) -> None:
    tier = tiers.open()
    save(tier, NS, HASHES)
    tiers.path.rename(tmp_path / "moved")
    with pytest.raises(TierError, match="the directory of the start is not here"):
        tier.drop(Drop(b"model", "n"))
    assert not tiers.path.exists(), "where it was, there is room for it to come back"
    (tmp_path / "moved").rename(tiers.path)
    tier.drop(Drop(b"model", "n"))
    assert load(tiers.reopen(), NS, HASHES)[0] == 0


def test_a_drop_that_cannot_be_done_is_an_error_of_the_tier(tiers: Tiers) -> None:
    tier = tiers.open()
    save(tier, NS, HASHES)
    (tiers.path / "trash").write_text("")  # also for root, nothing can be moved here
    with pytest.raises(TierError, match="forgetting KV in"):
        tier.drop(Drop(b"model", "n"))


def test_a_directory_that_is_removed_is_a_miss_and_comes_back(tiers: Tiers) -> None:
    tier = tiers.open()
    save(tier, NS, HASHES)
    remove_all(tiers.path)
    assert load(tier, NS, HASHES) == (0, Cause.ABSENT)
    save(tier, NS, HASHES)
    assert load(tier, NS, HASHES) == (24, None)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/etc/hostname")])
def test_a_descriptor_that_is_no_file_is_told_and_saves_go_on(
    tiers: Tiers, make: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    save(tiers.open(), NS, HASHES)
    tiers.close()
    descriptor = tiers.path / "namespaces" / NS.root.hex() / "namespace.json"
    descriptor.unlink()
    make(descriptor)
    tier = tiers.open()
    tier.wait_until_indexed()
    assert tier.contents().quarantined == {"foreign": 1}
    assert "namespace.json that can be trusted" in caplog.text
    save(tier, NS, HASHES)
    assert load(tiers.reopen(), NS, HASHES) == (24, None)


def test_a_descriptor_that_becomes_a_pipe_is_an_error_of_the_tier(tiers: Tiers) -> None:
    tier = tiers.open(poll_seconds=60.0)
    save(tier, NS, HASHES[:2])
    descriptor = tiers.path / "namespaces" / NS.root.hex() / "namespace.json"
    tier._scan.close()
    descriptor.unlink()
    os.mkfifo(descriptor)
    with pytest.raises(TierError, match=r"namespace.json"):
        tier.save(NS, records(NS, HASHES[2:]))


def test_a_file_that_cannot_be_read_is_an_error_of_the_tier(tiers: Tiers) -> None:
    tier = tiers.open(poll_seconds=60.0)
    save(tier, NS, HASHES)
    (file,) = group_files(tiers.path)
    file.unlink()
    file.mkdir()  # reading it is EISDIR, also for root
    with pytest.raises(TierError, match="reading from"):
        tier.load(NS, HASHES)


def test_a_file_that_cannot_be_read_at_start_hides_no_other(tiers: Tiers) -> None:
    tier = tiers.open()
    spaces = [NS, a_namespace("m"), a_namespace("o")]
    for space in spaces:
        save(tier, space, chain(space, "p", 4))
        (tiers.path / "namespaces" / space.root.hex() / "unreadable.kv").mkdir()
    tier = tiers.reopen()
    tier.wait_until_indexed()
    assert tier.contents().num_blocks == 12


# ── other versions of the software ──────────────────────────────────────────────────────────


def of_another_version(file: Path) -> None:
    """Make it a file of another version: not even the checksum of its head is ours."""
    data = bytearray(file.read_bytes())
    data[8:12] = (VERSION + 1).to_bytes(4, "little")
    data[TABLE_BYTES - 16 : TABLE_BYTES] = bytes(16)
    file.write_bytes(data)


def test_what_another_version_wrote_is_left_alone_and_not_found(tiers: Tiers) -> None:
    tier = damaged(tiers, of_another_version, at_start=True)
    (file,) = group_files(tiers.path)
    assert load(tier, NS, HASHES) == (0, Cause.ABSENT)
    assert tier.contents().num_bytes == file.stat().st_size, "it counts for the bound"
    save(tier, NS, HASHES)
    assert load(tier, NS, HASHES) == (24, None)
    assert file.exists()
    assert quarantined(tiers.path) == []


def test_what_another_version_wrote_is_evicted_by_age_like_all_else(tiers: Tiers) -> None:
    bound = 80 * record_bytes(NS)
    tier = tiers.open(bound)
    save(tier, NS, HASHES[:8])
    (file,) = group_files(tiers.path)
    of_another_version(file)
    tier = tiers.reopen(bound)
    for i in range(12):
        save(tier, NS, chain(NS, f"p{i}", 8))
    assert not file.exists()


def test_a_namespace_that_another_version_describes_is_left_alone(tiers: Tiers) -> None:
    save(tiers.open(), NS, HASHES)
    tiers.close()
    (descriptor,) = tiers.path.glob("namespaces/*/namespace.json")
    text = b'{"a field of tomorrow": 1}'
    descriptor.write_bytes(text + b"\n" + xxhash.xxh3_128_hexdigest(text).encode() + b"\n")
    tier = tiers.reopen()
    tier.wait_until_indexed()
    assert load(tier, NS, HASHES) == (0, Cause.ABSENT)
    assert len(group_files(tiers.path)) == 1
    assert quarantined(tiers.path) == []


# ── other users ─────────────────────────────────────────────────────────────────────────────


def modes(path: Path) -> dict[str, set[int]]:
    """Modes of all directories and of all files at and below a path."""
    found: dict[str, set[int]] = {"directories": set(), "files": set()}
    for one in (path, *path.rglob("*")):
        found["directories" if one.is_dir() else "files"].add(stat.S_IMODE(one.lstat().st_mode))
    return found


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("no_umask")
def test_no_other_user_may_read_or_write_what_is_stored_whatever_the_umask(
    tmp_path: Path,
) -> None:
    tier = DiskTier(tmp_path / "made" / "too", MIB)
    save(tier, NS, HASHES)
    flip(-1)(group_files(tmp_path / "made" / "too")[0])
    load(tier, NS, HASHES)
    save(tier, NS, HASHES)
    tier.drop(Drop(b"model"))
    save(tier, NS, HASHES)
    assert modes(tmp_path / "made") == {"directories": {0o700}, "files": {0o600}}
    tier.close()


def test_directories_that_were_open_to_others_are_closed_to_them(tiers: Tiers) -> None:
    save(tiers.open(), NS, HASHES)
    tiers.close()
    (tiers.path / "namespaces").chmod(0o755)
    assert load(tiers.open(), NS, HASHES) == (24, None)
    assert modes(tiers.path)["directories"] == {0o700}


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        (0o770, r"with mode 0770, but KV must lie where only .* may write; chmod 700 /.*/kv$"),
        (0o702, r"with mode 0702, "),
        (0o1777, r"with mode 1777, "),
    ],
)
def test_a_directory_that_others_may_write_to_is_refused(
    tiers: Tiers, mode: int, said: str
) -> None:
    tiers.path.mkdir()
    tiers.path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"--kv-disk-path {tiers.path}: belongs to .* {said}"):
        tiers.open()


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o750])
def test_a_directory_that_others_may_only_read_is_taken(tiers: Tiers, mode: int) -> None:
    tiers.path.mkdir()
    tiers.path.chmod(mode)
    save(tiers.open(), NS, HASHES)
    assert modes(tiers.path / "namespaces")["directories"] == {0o700}


def test_a_directory_of_another_user_is_refused(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers.path.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    remedy = r"name a directory of its own, such as /.*/kv/lora-serve-kv, or chown uid 54321 /"
    with pytest.raises(ConfigError, match=rf"user uid 54321 may write; {remedy}"):
        tiers.open()


def test_a_link_of_another_user_is_not_followed_to_the_directory(
    tiers: Tiers, tmp_path: Path
) -> None:
    if os.geteuid():
        pytest.skip("ONLY ROOT CAN PLANT ANOTHER USER'S LINK: it is not tested")
    (tmp_path / "ours").mkdir(mode=0o700)
    tiers.path.symlink_to(tmp_path / "ours")
    os.lchown(tiers.path, 54321, 54321)
    with pytest.raises(ConfigError, match=r"is a link of uid 54321; name the directory itself"):
        tiers.open()
    assert list((tmp_path / "ours").iterdir()) == []


def test_a_link_of_ones_own_leads_to_the_directory(tiers: Tiers, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    tiers.path.symlink_to(tmp_path / "disk")
    save(tiers.open(), NS, HASHES)
    assert len(group_files(tmp_path / "disk")) == 1


@pytest.mark.parametrize("planted", ["staging/turn", "staging/writer"])
def test_a_planted_link_has_no_file_truncated_or_written(
    tiers: Tiers, tmp_path: Path, planted: str
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("data")
    (tiers.path / "staging").mkdir(parents=True)
    (tiers.path / planted).symlink_to(precious)
    tier = tiers.open()
    with suppress(TierError):
        save(tier, NS, HASHES)
    tier.drop(Drop(b"model"))
    tiers.close()
    assert precious.read_text() == "data"


@pytest.mark.parametrize("planted", ["namespaces", "staging", "trash", "quarantine"])
def test_a_planted_directory_link_has_nothing_made_moved_or_deleted_elsewhere(
    tiers: Tiers, tmp_path: Path, planted: str
) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "deep").mkdir(parents=True)
    (elsewhere / "deep" / "precious").write_text("data")
    tiers.path.mkdir(mode=0o700)
    (tiers.path / planted).symlink_to(elsewhere)
    tier = tiers.open()
    for act in (
        lambda: save(tier, NS, HASHES),
        lambda: flip(-1)(group_files(tiers.path)[0]),
        lambda: load(tier, NS, HASHES),
        lambda: tier.drop(Drop(b"model")),
        lambda: save(tier, NS, HASHES),
    ):
        with suppress(TierError, IndexError):
            act()
    tiers.close()
    with suppress(NotADirectoryError):
        DiskDirectory(tiers.path).sweep()
    assert [one.name for one in elsewhere.rglob("*")] == ["deep", "precious"]


def test_a_planted_group_is_not_read_through_a_link(tiers: Tiers, tmp_path: Path) -> None:
    tier = tiers.open(poll_seconds=60.0)
    save(tier, NS, HASHES)
    (file,) = group_files(tiers.path)
    file.rename(tmp_path / "elsewhere.kv")
    file.symlink_to(tmp_path / "elsewhere.kv")
    with pytest.raises(TierError, match="Too many levels of symbolic links"):
        load(tier, NS, HASHES)
    assert load(tiers.reopen(), NS, HASHES) == (0, Cause.ABSENT)


def test_a_pipe_in_a_groups_place_hangs_no_caller(tiers: Tiers) -> None:
    tier = tiers.open(poll_seconds=60.0)
    save(tier, NS, HASHES)
    (file,) = group_files(tiers.path)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(TierError, match="is not a regular file"):
        load(tier, NS, HASHES)
    tiers.reopen().wait_until_indexed()


def test_a_directory_that_is_swapped_for_a_link_while_it_is_used_redirects_nothing(
    tiers: Tiers, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / NS.root.hex()).mkdir(parents=True)
    (elsewhere / NS.root.hex() / "precious.kv").write_text("data")
    tier = tiers.open(64 * record_bytes(NS))
    place, aside = tiers.path / "namespaces", tiers.path / "aside"
    is_over = threading.Event()

    def swap() -> None:
        while not is_over.is_set():
            with suppress(OSError):  # whatever is there already
                place.rename(aside)
            with suppress(OSError):
                place.symlink_to(elsewhere)
                time.sleep(0.0005)
                place.unlink()
            shutil.rmtree(aside, ignore_errors=True)

    thread = threading.Thread(target=swap)
    thread.start()
    for i in range(150):
        hashes = chain(NS, f"p{i}", 4)
        with suppress(TierError):
            save(tier, NS, hashes)
            load(tier, NS, hashes)
            if i % 10 == 0:
                tier.drop(Drop(b"model"))
    is_over.set()
    thread.join()
    assert [one.name for one in elsewhere.rglob("*")] == [NS.root.hex(), "precious.kv"]


# ── several processes ───────────────────────────────────────────────────────────────────────


def test_another_processes_new_files_are_found(tiers: Tiers) -> None:
    one, two = tiers.open(), tiers.open()
    save(one, NS, HASHES)
    assert load(two, NS, HASHES) == (24, None)  # looks at once, since it misses
    save(one, a_namespace("m"), chain(a_namespace("m"), "p", 4))
    eventually(lambda: two.holds(a_namespace("m"), chain(a_namespace("m"), "p", 4)[0]))


WRITER = """
import sys
from pathlib import Path
from lora_serve.kv_tiers.disk.tier import DiskTier
from tests.fakes.kv_blocks import a_namespace, chain, content, records

path, capacity, name = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
tier, namespace = DiskTier(path, capacity, poll_seconds=60.0), a_namespace()
print("ready", flush=True)
for i in range(60):
    for hashes in (chain(namespace, f"{name} {i}", 8), chain(namespace, f"shared {i}", 8)):
        tier.save(namespace, records(namespace, hashes))
    for hashes in (chain(namespace, f"shared {i - 3}", 8), chain(namespace, f"one {i - 5}", 8)):
        for block_hash, record in zip(hashes, tier.load(namespace, hashes).records):
            assert record.payload == content(namespace, block_hash), "a wrong block"
tier.close()
print("done", tier.contents().num_bytes)
"""


def test_two_processes_write_read_and_evict_in_one_directory(tiers: Tiers) -> None:
    bound = 200 * record_bytes(NS)
    commands = [[sys.executable, "-c", WRITER, str(tiers.path), str(bound), name]
                for name in ("one", "two")]  # fmt: skip
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]
    most_bytes = 0
    while any(process.poll() is None for process in processes):
        most_bytes = max(most_bytes, bytes_of_kv(tiers.path))
        time.sleep(0.005)
    for process in processes:
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        assert b"done" in out
    assert bound / 2 < max(most_bytes, bytes_of_kv(tiers.path)) <= bound
    assert quarantined(tiers.path) == []


def test_what_another_process_is_writing_counts_towards_the_bound(tiers: Tiers) -> None:
    bound = 32 * record_bytes(NS)
    other = tiers.open(bound, poll_seconds=60.0)

    def write(file: int, namespace: TierNamespace, some: Sequence[Record]) -> int:
        save(other, NS, chain(NS, f"while writing {some[0].block_hash.hex()}", 4))
        assert bytes_of_kv(tiers.path) <= bound * 15 // 16  # the rest is the quarantine's
        return write_group(file, namespace, some)

    tier = tiers.open(bound, poll_seconds=60.0, write=write)
    for i in range(12):
        save(tier, NS, chain(NS, f"one's {i}", 4))
        save(other, NS, chain(NS, f"the other's {i}", 4))
        assert bytes_of_kv(tiers.path) <= bound * 15 // 16


@pytest.mark.parametrize("lost", [lambda text: b"", lambda text: text[:-40], lambda text: b"x"])
def test_the_bound_holds_where_writers_lose_each_others_changes(
    tiers: Tiers, lost: Callable[[bytes], bytes]
) -> None:
    bound = 32 * record_bytes(NS)
    both = [tiers.open(bound, poll_seconds=60.0) for _ in range(2)]
    log = tiers.path / "staging" / "writer"
    for i in range(24):
        save(both[i % 2], NS, chain(NS, f"{i}", 4))
        assert bytes_of_kv(tiers.path) <= bound * 15 // 16
        if i % 3 == 0:
            log.write_bytes(lost(log.read_bytes()))


def looks_in_a_save(
    tiers: Tiers, num_namespaces: int, monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """How often savers in turn look for a directory, where so many lie."""
    places: list[int] = []
    of = DiskDirectory.of

    def counted(directory: DiskDirectory, root: bytes) -> Folder:
        places.append(threading.get_ident())
        return of(directory, root)

    for i in range(num_namespaces):
        namespace = a_namespace(f"{i}")
        save(tiers.open(poll_seconds=60.0), namespace, chain(namespace, "p", 2))
    both = [tiers.open(poll_seconds=60.0) for _ in range(2)]
    for tier in both:
        save(tier, NS, chain(NS, f"its first {id(tier)}", 2))
    monkeypatch.setattr(DiskDirectory, "of", counted)
    counts = []
    for i in range(8):
        namespace = a_namespace(f"{i % 4}")
        places.clear()
        save(both[i % 2], namespace, chain(namespace, f"{i} of {num_namespaces}", 2))
        counts.append(places.count(threading.get_ident()))
    monkeypatch.undo()
    return counts


def test_savers_in_turn_look_only_where_the_other_has_written(
    tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = looks_in_a_save(tiers, 4, monkeypatch)
    assert looks_in_a_save(tiers, 40, monkeypatch) == few


def test_what_another_process_wrote_or_dropped_is_known_at_the_next_save(
    tiers: Tiers,
) -> None:
    one, two = (tiers.open(poll_seconds=60.0) for _ in range(2))
    salted = a_namespace(salt="s")
    for tier in (one, two):
        save(tier, NS, chain(NS, f"first of {id(tier)}", 2))
    save(one, salted, chain(salted, "p", 8))
    save(two, NS, chain(NS, "p", 2))
    assert two.holds(salted, chain(salted, "p", 8)[0])
    one.drop(Drop(b"model", "n", keep=None))
    save(two, a_namespace("m"), chain(a_namespace("m"), "p", 2))
    assert not two.holds(salted, chain(salted, "p", 8)[0])
    assert two.contents().num_blocks == 2


def test_what_another_process_evicted_takes_no_room_at_the_next_save(tiers: Tiers) -> None:
    one, two = (tiers.open(32 * record_bytes(NS), poll_seconds=60.0) for _ in range(2))
    oldest = chain(NS, "the oldest", 4)
    save(one, NS, oldest)
    for i in range(4):  # so that there is room for two's, and for no more
        save(one, NS, chain(NS, f"{i}", 4))
    save(two, NS, chain(NS, "two's first", 4))
    assert load(two, NS, oldest) == (4, None)  # for two it is the youngest now
    save(one, NS, chain(NS, "one's last", 4))
    save(two, NS, chain(NS, "two's last", 4))
    assert not two.holds(NS, oldest[0])
    assert two.contents().num_bytes == bytes_of_kv(tiers.path)


def bytes_of_kv(path: Path) -> int:
    """What is moved into its place meanwhile is missed rather than counted twice."""
    files = [*group_files(path), *listed(path, "staging/*/*")]
    sizes = 0
    for file in files:
        with suppress(FileNotFoundError):
            sizes += file.stat().st_size
    return sizes


HALF_WRITER = """
import os, sys, time
from pathlib import Path
from lora_serve.kv_tiers.disk.tier import DiskTier
from tests.fakes.kv_blocks import a_namespace, chain, records

def slow(file, namespace, some):
    os.write(file, b"half of it")
    print("writing", flush=True)
    time.sleep(60)

tier = DiskTier(Path(sys.argv[1]), 2**20, write=slow)
tier.save(a_namespace(), records(a_namespace(), chain(a_namespace(), "p", 4)))
"""


def test_what_a_killed_process_left_half_written_is_removed(tiers: Tiers) -> None:
    command = [sys.executable, "-c", HALF_WRITER, str(tiers.path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"writing\n"
    living = tiers.open()
    save(living, NS, HASHES)
    assert len(list(tiers.path.glob("staging/*/*"))) == 3  # two locks and the half file
    process.kill()
    process.communicate()
    second = tiers.open()
    eventually(lambda: len(listed(tiers.path, "staging/*/lock")) == 1)  # the living one's
    assert load(second, NS, HASHES) == (24, None)
