"""What the Docker images promise: locked packages, bases that can be pinned, no root, a probe.

No image is built here.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCKER = Path(__file__).parents[2] / "docker"
FILES = sorted(DOCKER.glob("Dockerfile.*"))


def test_there_is_one_for_each_kind_of_machine() -> None:
    assert [path.suffix for path in FILES] == [".cpu", ".cuda"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_base_image_can_be_given_by_digest(path: Path) -> None:
    text = path.read_text()
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert len(bases) == 2
    for base in bases:
        name = re.fullmatch(r"\$\{(\w+)\}", base)
        assert name, f"{base} cannot be chosen"
        assert f"ARG {name[1]}=" in text.split("FROM ")[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_what_serves_is_installed_from_what_the_lock_file_names(path: Path) -> None:
    text = path.read_text().replace("\\\n", " ")
    assert re.search(r"pip download .*--require-hashes -r cpu\.lock -d /wheels", text)
    installs = re.findall(r"pip install (.*)$", text, re.MULTILINE)
    assert len(installs) == 2
    for install in installs:
        assert "--find-links /wheels" in install
        assert "--no-index" in install or "-c versions.txt" in install


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_image_runs_as_nobody_special_and_can_tell_that_it_is_well(path: Path) -> None:
    last = path.read_text().split("FROM ")[-1]
    (user,) = re.findall(r"^USER (\S+)", last, re.MULTILINE)
    assert int(user) > 0, "a number, because Kubernetes cannot tell by a name that it is not root"
    assert "HEALTHCHECK" in last
    assert "/health" in last
