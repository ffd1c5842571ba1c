from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from lora_serve.ops.cpu.threads import cpu_quota, default_num_threads, physical_cores, pin_threads


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"}, 1.5),
        (
            {
                "proc/self/cgroup": "0::/pod/box",
                "sys/fs/cgroup/pod/cpu.max": "200000 100000",
                "sys/fs/cgroup/pod/box/cpu.max": "max 100000",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "5:memory:/box\n4:cpu,cpuacct:/box",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            None,
        ),
    ],
)
def test_the_narrowest_control_group_limits(
    tmp_path: Path, files: dict[str, str], quota: float | None
) -> None:
    assert cpu_quota(write(tmp_path, files)) == quota


@pytest.mark.parametrize("limit", ["100000 100000", "150000 100000", "30000 100000"])
def test_a_quota_of_one_cpu_gives_one_thread(tmp_path: Path, limit: str) -> None:
    files = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": limit}
    assert default_num_threads(write(tmp_path, files)) == 1


def test_two_cpus_of_one_core_count_once(tmp_path: Path) -> None:
    siblings = {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"}
    name = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    root = write(tmp_path, {name.format(cpu): text for cpu, text in siblings.items()})
    assert physical_cores({5, 4, 1, 0}, root) == [0, 1]
    assert physical_cores({4, 5}, root) == [4, 5]
    assert physical_cores({0, 4}, root) == [0]


def test_without_a_quota_every_core_that_is_allowed_has_a_thread(tmp_path: Path) -> None:
    assert default_num_threads(tmp_path) == len(os.sched_getaffinity(0))


class Sleeper(threading.Thread):
    """A thread that waits, to be pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.end = threading.Event()
        self.start()

    def run(self) -> None:
        self.end.wait()


def test_each_thread_but_the_callers_gets_a_core_of_its_own(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    sleepers = [Sleeper() for _ in cpus[1:]]
    ids = [threading.get_native_id(), *(sleeper.native_id or 0 for sleeper in sleepers)]
    try:
        assert pin_threads(ids, tmp_path)
        assert [os.sched_getaffinity(i) for i in ids[1:]] == [{cpu} for cpu in cpus[1:]]
        assert os.sched_getaffinity(0) == set(cpus)
    finally:
        for sleeper in sleepers:
            sleeper.end.set()


def test_fewer_threads_than_cores_stay_free(tmp_path: Path) -> None:
    sleeper = Sleeper()
    before = os.sched_getaffinity(sleeper.native_id or 0)
    many = [threading.get_native_id(), *[sleeper.native_id or 0] * len(before)]
    assert not pin_threads(many, tmp_path)
    files = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "50000 100000"}
    assert not pin_threads(many[: len(before)], write(tmp_path, files))
    assert os.sched_getaffinity(sleeper.native_id or 0) == before
    sleeper.end.set()
