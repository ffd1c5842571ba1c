"""What is gathered for a machine without a network: all that it lacks, and nothing that it has."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu.wheels import PROJECT, download_command, requirements, write_hollow_wheel

HAS = ["torch==2.11.0", "scikit_build-core==1.0"]


def names(packages: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", package)[0] for package in packages}


def test_the_package_its_tests_and_its_build_are_asked_for() -> None:
    found = names(requirements(PROJECT))
    assert {"torch", "msgspec", "redis", "pytest-asyncio", "openai", "nanobind"} <= found
    assert found.isdisjoint({"lora-serve", "ruff", "mypy", "matplotlib"})


@pytest.mark.parametrize("package", HAS)
def test_pip_takes_a_hollow_wheel_for_the_package(package: str, tmp_path: Path) -> None:
    wheel = write_hollow_wheel(f"{package}+there", tmp_path)
    name, _, version = package.partition("==")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    offline = [*command, "--no-index", f"--find-links={tmp_path}", f"--target={tmp_path / 'site'}"]
    subprocess.run([*offline, f"{name}>=0.1"], check=True)
    (metadata,) = (tmp_path / "site").glob("*.dist-info/METADATA")
    assert f"Version: {version}+there" in metadata.read_text()
    assert zipfile.ZipFile(wheel).testzip() is None


def test_what_is_there_is_asked_for_as_it_is_there(tmp_path: Path) -> None:
    command = download_command("3.12", ["torch==2.11.0+there"], tmp_path, tmp_path / "wheels")
    assert {"torch==2.11.0+there", "--python-version=3.12", "--only-binary=:all:"} <= set(command)


def test_a_package_without_a_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="say which version"):
        write_hollow_wheel("torch", tmp_path)
