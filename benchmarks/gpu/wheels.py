"""python -m benchmarks.gpu.wheels: what a GPU machine without a network lacks, in one folder.

pip's own resolver chooses them. It gets what that machine has as wheels without content, so that
nothing large is fetched, and nothing that does not go with what is there.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
EXTRAS = ("redis", "test")
# pip takes a wheel for exactly one of the names it is given: these are the ones in use.
PLATFORMS = (
    *(f"manylinux{name}_x86_64" for name in ("1", "2010", "2014")),
    *(f"manylinux_2_{minor}_x86_64" for minor in (5, 12, 17, 24, 26, 27, 28, 31, 34)),
)


def requirements(project: Path) -> list[str]:
    """What the package, its tests, and the build of its kernels there require."""
    found: dict[str, Any] = tomllib.loads(project.read_text())
    extras = found["project"]["optional-dependencies"]
    return [
        *found["project"]["dependencies"],
        *(requirement for extra in EXTRAS for requirement in extras[extra]),
        *found["build-system"]["requires"],
    ]


def write_hollow_wheel(package: str, directory: Path) -> Path:
    """A wheel of `name==version` that holds its name and asks for nothing."""
    name, _, version = package.partition("==")
    if not version:
        raise SystemExit(f"--has {package}: say which version, as in {name}==1.0")
    stem = f"{re.sub(r'[-_.]+', '_', name)}-{version}"
    info = f"{stem}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path = directory / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, content in files.items():
            wheel.writestr(file, content)
        wheel.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in wheel.namelist()))
    return path


def download_command(python: str, has: Sequence[str], hollow: Path, target: Path) -> list[str]:
    platforms = [f"--platform={name}" for name in PLATFORMS]
    return [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"),
        *("--implementation=cp", f"--python-version={python}", *platforms),
        *(f"--find-links={hollow}", f"--dest={target}", *requirements(PROJECT), *has),
    ]


def gather(python: str, has: Sequence[str], target: Path) -> list[Path]:
    """Fill `target` with the wheels that are missing; those of an earlier call are removed."""
    target.mkdir(parents=True, exist_ok=True)
    for wheel in target.glob("*.whl"):
        wheel.unlink()
    with tempfile.TemporaryDirectory() as directory:
        hollow = Path(directory)
        marked = [f"{package.partition('+')[0]}+there" for package in has]  # as on no index
        there = [write_hollow_wheel(package, hollow) for package in marked]
        subprocess.run(download_command(python, marked, hollow, target), check=True)
        for wheel in there:
            (target / wheel.name).unlink()
    return sorted(target.glob("*.whl"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default="3.12", help="that machine's, on Linux x86-64")
    parser.add_argument("--has", nargs="*", default=[], metavar="NAME==VERSION")
    parser.add_argument("--out", type=Path, required=True, help="the folder")
    chosen = parser.parse_args()
    wheels = gather(chosen.python, chosen.has, chosen.out)
    num_bytes = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels of {num_bytes / 2**20:.1f} MiB in {chosen.out}")


if __name__ == "__main__":
    main()
