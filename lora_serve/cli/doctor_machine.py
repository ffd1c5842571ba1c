"""The machine: processors, memory, limits and devices, as far as they decide how a server runs."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from lora_serve.bench.machine import describe_machine
from lora_serve.cli.doctor_finding import Finding, Level
from lora_serve.config import ServerConfig
from lora_serve.engine.frontend.socket_directory import SocketDirectory
from lora_serve.errors import ConfigError
from lora_serve.observability.sizes import shown_bytes
from lora_serve.ops.cpu.threads import ROOT, cpu_quota, default_num_threads, physical_cores

LITTLE_MEMORY = 2 * 2**30
LITTLE_TEMPORARY = 64 * 2**20
RESERVED_FILES = 256  # besides connections
GPU_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
GPU_SECONDS = 2.0
STRICT_OVERCOMMIT = "2"


def machine_findings(root: Path = ROOT) -> list[Finding]:
    """root: where /proc and /sys are."""
    checks: tuple[Callable[[Path], Iterator[Finding]], ...] = (
        *(_processors, _memory, _huge_pages, _numa, _overcommit, _gpu, _open_files),
        *(_temporary, _shared_memory),
    )
    return [finding for check in checks for finding in check(root)]


def available_bytes(root: Path = ROOT) -> int:
    """Memory that a new process could take, with its control group's limit."""
    free = _meminfo(root).get("MemAvailable", 0)
    limit = _group_limit(root)
    return free if limit is None else min(free, limit)


def _processors(root: Path) -> Iterator[Finding]:
    machine = describe_machine(())
    cpus = os.sched_getaffinity(0)
    cores, quota = len(physical_cores(cpus, root)), cpu_quota(root)
    limited = f", of which a quota leaves the time of {quota:g}" if quota is not None else ""
    yield Finding("CPU", f"{machine.cpu}; {_counted(cores, 'core')}, {len(cpus)} threads{limited}")
    threads = default_num_threads(root)
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) < threads:
        yield Finding(
            "threads",
            f"kernels take {given} threads, as OMP_NUM_THREADS says, of {threads} possible ones",
            Level.WARNING,
            "unset OMP_NUM_THREADS, or give --cpu-threads",
        )
    else:
        yield Finding("threads", f"kernels take {_counted(threads, 'thread')} (--cpu-threads)")
    if quota is not None and quota < 1:
        yield Finding(
            "quota",
            f"a quota leaves {quota:g} CPUs",
            Level.WARNING,
            "give the container a whole CPU",
        )


def _memory(root: Path) -> Iterator[Finding]:
    total, free = _meminfo(root).get("MemTotal", 0), available_bytes(root)
    limit = _group_limit(root)
    limited = "" if limit is None else f"; this control group may take {shown_bytes(limit)} more"
    told = f"{shown_bytes(total)}, {shown_bytes(free)} available{limited}"
    if free < LITTLE_MEMORY:
        yield Finding(
            "memory",
            told,
            Level.WARNING,
            "weights, KV and two processes share this; end what else runs, or serve a small model",
        )
    else:
        yield Finding("memory", told)


def _huge_pages(root: Path) -> Iterator[Finding]:
    text = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = text.partition("[")[2].partition("]")[0]
    if chosen == "never":
        yield Finding(
            "huge pages",
            "never; weights are then read with more misses of the TLB",
            Level.HINT,
            "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    elif chosen:
        yield Finding("huge pages", f"{chosen}; weights and KV are put on them")


def _numa(root: Path) -> Iterator[Finding]:
    nodes = sorted((root / "sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) > 1:
        yield Finding(
            "NUMA",
            f"{len(nodes)} nodes; a kernel's threads should not reach over to another's memory",
            Level.HINT,
            "one server a node: numactl --cpunodebind=0 --membind=0 lora-serve serve …; or one for "
            "all of them: lora-serve serve --cpu-ranks auto …",
        )
    elif nodes:
        yield Finding("NUMA", "one node")


def _overcommit(root: Path) -> Iterator[Finding]:
    if _text(root / "proc/sys/vm/overcommit_memory") == STRICT_OVERCOMMIT:
        yield Finding(
            "overcommit",
            "vm.overcommit_memory is 2: memory that is reserved and not used counts",
            Level.WARNING,
            "as root: sysctl vm.overcommit_memory=0, or expect that large models do not start",
        )


def _gpu(root: Path) -> Iterator[Finding]:
    driver = _text(root / "proc/driver/nvidia/version").partition("\n")[0]
    if shutil.which(GPU_QUERY[0]) is None:
        has_driver = f"{driver}, but no {GPU_QUERY[0]}" if driver else "none; the CPU serves"
        yield Finding("GPU", has_driver)
        return
    try:
        asked = subprocess.run(
            GPU_QUERY, capture_output=True, text=True, timeout=GPU_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        yield Finding("GPU", f"{GPU_QUERY[0]} fails: {error}", Level.WARNING, "mend the driver")
        return
    for line in asked.stdout.splitlines():
        yield Finding("GPU", f"{line} (--device cuda)")


def _open_files(_: Path) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = ServerConfig().max_connections + RESERVED_FILES
    if hard != resource.RLIM_INFINITY and hard < wanted:
        yield Finding(
            "open files",
            f"at most {hard:,}, too few for --max-connections {ServerConfig().max_connections}",
            Level.HINT,
            f"ulimit -Hn {wanted} (LimitNOFILE of systemd), or lower --max-connections",
        )
    else:
        shown = "any number" if hard == resource.RLIM_INFINITY else f"{hard:,}"
        yield Finding("open files", f"{shown} (now {soft:,}; a server raises it)")


def _temporary(_: Path) -> Iterator[Finding]:
    place = tempfile.gettempdir()
    try:
        SocketDirectory().close()
        free = shutil.disk_usage(place).free
    except (ConfigError, OSError) as error:
        yield Finding(
            "temporary",
            f"{place} cannot hold the sockets between a server's processes: {error}",
            Level.ERROR,
            "set TMPDIR to a short path of a writable directory",
        )
        return
    if free < LITTLE_TEMPORARY:
        yield Finding(
            "temporary",
            f"{place} has {shown_bytes(free)} left",
            Level.WARNING,
            "make room, or set TMPDIR",
        )
    else:
        yield Finding("temporary", f"{place}, {shown_bytes(free)} free")


def _shared_memory(_: Path) -> Iterator[Finding]:
    if os.path.isdir("/dev/shm"):
        size = shutil.disk_usage("/dev/shm").total
        yield Finding("/dev/shm", f"{shown_bytes(size)}; a server needs none of it")


def _meminfo(root: Path) -> Mapping[str, int]:
    """Bytes by name."""
    lines = (line.split() for line in _text(root / "proc/meminfo").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3}


def _group_limit(root: Path) -> int | None:
    """What this process's control group may still take; None without a limit."""
    group = _text(root / "proc/self/cgroup").partition("0::")[2].partition("\n")[0].strip("/")
    mount = root / "sys/fs/cgroup"
    place = mount / group
    left = []
    for each in (place, *(one for one in place.parents if one.is_relative_to(mount))):
        limit, used = _text(each / "memory.max"), _text(each / "memory.current")
        if limit.isdigit() and used.isdigit():
            left.append(max(0, int(limit) - int(used)))
    return min(left, default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
