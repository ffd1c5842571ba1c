"""What many folders' tests share, and how `pytest -n 2` cuts the suite in two.

Every process of a run imports this, so what imports torch or transformers is imported in fixtures.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from xdist.scheduler import LoadScopeScheduling

from lora_serve.memory_bound import bounded_memory
from tests.fakes import shared_certificates

if TYPE_CHECKING:
    from lora_serve.text.tokenizer import Tokenizer

WITH_SERVERS = "e2e"  # one worker runs this folder: its servers are started once, not twice
SOAK_SECONDS = 3600  # for tests marked slow; others have pyproject.toml's timeout


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--server-flags",
        default="",
        help="more flags for the servers of tests/e2e, such as '--device cuda --batch-invariant'",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Unless the GPU's tests were asked for, hide the GPU: "auto" then means the CPU.

    What a program compiles of us is kept for the next, or each server would compile 500 modules.
    """
    if "not gpu" in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    shared_certificates.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The folder with servers starts first: it takes longest."""
    items.sort(key=lambda item: WITH_SERVERS not in item.path.parts)
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(SOAK_SECONDS))


class ByFile(LoadScopeScheduling):
    """A file's tests stay together, with its fixtures; so do all files with servers."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return WITH_SERVERS if WITH_SERVERS in Path(path).parts else path


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFile:
    return ByFile(config, log)


def pytest_collection_finish() -> None:
    """Spare the garbage collector the thousands of tests, over which it would walk in each."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # else what was frozen is never freed, which nanobind takes for a leak


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.fakes.served_model import save_served_model

    return save_served_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="session")
def adapter_paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three adapters of different ranks for the served model."""
    from tests.fakes.peft_adapters import save_adapters

    return save_adapters(tmp_path_factory.mktemp("adapters"), "qwen2")


# A machine that others use at the same time is slow: that is no failure of a test.
hypothesis.settings.register_profile(
    "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    from lora_serve.text.tokenizer import Tokenizer
    from tests.fakes.tokenizer_files import byte_level_tokenizer, saved

    return Tokenizer(str(saved(byte_level_tokenizer(), tmp_path_factory.mktemp("byte_level"))))


@pytest.fixture(scope="session")
def sentence_piece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    from lora_serve.text.tokenizer import Tokenizer
    from tests.fakes.tokenizer_files import saved, sentence_piece_tokenizer

    return Tokenizer(str(saved(sentence_piece_tokenizer(), tmp_path_factory.mktemp("pieces"))))


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Short enough for sockets, as pytest's own is not."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Half a gigabyte more than there is in use: what a lying header asks for is not to be had."""
    with bounded_memory(2**29):
        yield
