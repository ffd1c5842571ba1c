"""How many threads CPU kernels get, and on which cores. Knows the machine, and no kernel.

One thread for each physical core that this process may use: two on one core would share its
multipliers. A container's quota counts too: threads beyond it would only be stopped together.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path("/")


def default_num_threads(root: Path = ROOT) -> int:
    """How many threads the kernels take, at least 1. root: where /proc and /sys are."""
    cores = len(physical_cores(allowed_cpus(), root))
    quota = cpu_quota(root)
    return cores if quota is None else max(1, min(cores, math.floor(quota)))


def pin_threads(thread_ids: Sequence[int], root: Path = ROOT) -> bool:
    """Give each thread but the first, which is the caller's own, a core; whether that was done.

    Only if they are as many as all cores that this process may use: with fewer, which of the cores
    are free is better known to the system. Start servers that share a machine under `taskset`.

    Args:
        thread_ids: the system's ids, the caller's first.
    """
    cores = physical_cores(allowed_cpus(), root)
    quota = cpu_quota(root)
    if len(thread_ids) != len(cores) or (quota is not None and quota < len(cores)):
        return False
    for thread_id, core in zip(thread_ids[1:], cores[1:], strict=True):
        os.sched_setaffinity(thread_id, {core})
    return True


def physical_cores(cpus: Iterable[int], root: Path = ROOT) -> list[int]:
    """The first of `cpus` on each physical core, ascending."""
    return [core[0] for core in cores_of(cpus, root)]


def cores_of(cpus: Iterable[int], root: Path = ROOT) -> tuple[tuple[int, ...], ...]:
    """Group `cpus` by the physical core that they lie on, ascending."""
    cores: dict[str, list[int]] = {}
    for cpu in sorted(cpus):
        path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        cores.setdefault(_text(path) or f"alone {cpu}", []).append(cpu)
    return tuple(map(tuple, cores.values()))


def cpu_quota(root: Path = ROOT) -> float | None:
    """How many CPUs' worth of time this process's control groups leave it; None without a limit."""
    quotas = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        group = path.strip("/")
        if controllers == "":
            quotas += [_quota_v2(place) for place in _places(root / "sys/fs/cgroup", group)]
        elif "cpu" in controllers.split(","):
            quotas += [_quota_v1(place) for place in _places(root / "sys/fs/cgroup/cpu", group)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _places(mount: Path, group: str) -> list[Path]:
    """A group's directory and its parents', up to the mount; a container may see only the last."""
    place = mount / group
    return [place, *(parent for parent in place.parents if parent.is_relative_to(mount))]


def _quota_v2(place: Path) -> float | None:
    quota, _, period = _text(place / "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None


def _quota_v1(place: Path) -> float | None:
    quota, period = _text(place / "cpu.cfs_quota_us"), _text(place / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() else None  # -1: none


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def allowed_cpus() -> set[int]:
    """The CPUs that the system may run the calling thread on."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))
