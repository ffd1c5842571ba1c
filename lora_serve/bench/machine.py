"""Describes the machine and the software that a figure came from."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import lora_serve

PACKAGES = ("torch", "transformers", "peft", "numpy")


@dataclass(frozen=True, slots=True)
class Machine:
    """All that decides a figure besides the code.

    cpu_features: those that decide how fast products run.
    load_average: over the minute before; what else ran then took part in every figure.
    """

    cpu: str
    num_cores: int
    memory_gib: float
    cpu_features: tuple[str, ...]
    system: str
    python: str
    packages: Mapping[str, str]
    commit: str
    load_average: float

    def is_like(self, other: Machine) -> bool:
        """Whether figures of both may stand side by side, as far as these fields show."""
        changing = ("commit", "load_average")
        return all(
            getattr(self, f.name) == getattr(other, f.name)
            for f in fields(self)
            if f.name not in changing
        )


def describe_machine(packages: Sequence[str] = PACKAGES) -> Machine:
    facts = _cpu_facts()
    flags = facts.get("flags", "").split()
    wanted = [flag for flag in flags if flag.startswith(("avx", "amx")) or flag == "fma"]
    return Machine(
        cpu=_cpu_name(facts),
        num_cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        cpu_features=tuple(sorted(wanted)),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        packages={name: found for name in packages if (found := _version(name))},
        commit=_commit(),
        load_average=round(os.getloadavg()[0], 2),
    )


def _cpu_facts() -> dict[str, str]:
    """The first core's lines of /proc/cpuinfo; empty where there is none."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return {}
    first = path.read_text().partition("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def _cpu_name(facts: Mapping[str, str]) -> str:
    """The CPU's name, with its generation if known: a virtual machine may name the brand alone."""
    name = facts.get("model name", platform.processor() or "unknown")
    if "cpu family" not in facts:
        return name
    return f"{name} (family {facts['cpu family']}, model {facts.get('model', 'unknown')})"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    """Commit of the sources that run, with "+changes" if they differ; else the version."""
    where = Path(lora_serve.__file__).parent
    try:
        _git("ls-files", "--error-unmatch", "__init__.py", where=where)  # not an installed copy
        commit = _git("rev-parse", "--short", "HEAD", where=where)
        changes = _git("status", "--porcelain", "--untracked-files=no", where=where)
    except (OSError, subprocess.CalledProcessError):
        return f"version {lora_serve.__version__}"
    return commit + ("+changes" if changes else "")


def _git(*arguments: str, where: Path) -> str:
    command = ["git", "-C", str(where), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()
