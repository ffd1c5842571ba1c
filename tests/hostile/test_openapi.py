"""A live server does what its OpenAPI document says, whatever schemathesis makes of that."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from lora_serve.demo.server_process import ServerProcess
from lora_serve.server.routes import OPERATIONS
from tests.fakes.engine import FakeEngine
from tests.hostile.harness import run_long, run_quick
from tests.server.clients import serving

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
FLAGS = ("--enable-lora", "--enable-prompt-embeds", "--max-num-seqs", "8", "--max-model-len", "64")
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
NAMES = [f"{operation.method} {operation.path}" for operation in OPERATIONS]
SPOKEN = [(operation.body, operation.answer) for operation in OPERATIONS]
# Few of a second path to what takes the same bodies and answers the same.
NUM_EXAMPLES = {
    name: 4 if each[0] and each in SPOKEN[:place] else 20
    for place, (name, each) in enumerate(zip(NAMES, SPOKEN, strict=True))
}

Cases = dict[str, SearchStrategy[object]]


@pytest.fixture(scope="module")
def fake_server() -> Iterator[str]:
    """The whole server but for its engine, over sockets; its address."""
    address: queue.SimpleQueue[str] = queue.SimpleQueue()
    over = threading.Event()

    async def serve() -> None:
        async with serving(FakeEngine()) as url:
            address.put(url)
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    yield address.get(timeout=60)
    over.set()
    thread.join()


@pytest.fixture(scope="module")
def server(
    model_path: Path, adapter_paths: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    log = tmp_path_factory.mktemp("openapi") / "log"
    flags = (*FLAGS, "--lora-modules", f"a={adapter_paths[0]}")
    with ServerProcess(model_path, flags, log) as process:
        process.wait_until_healthy()
        yield process


@pytest.fixture(scope="module")
def cases(fake_server: str) -> Cases:
    return cases_of(fake_server)


def cases_of(url: str) -> Cases:
    """What each operation's schema allows and, if it has a body, what it does not."""
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    strategies = {}
    for name, operation in zip(NAMES, OPERATIONS, strict=True):
        described = schema[operation.path][operation.method]
        modes = MODES if operation.body else MODES[:1]
        strategies[name] = st.one_of(*(described.as_strategy(generation_mode=m) for m in modes))
    return strategies


def check(case: object) -> None:
    assert isinstance(case, schemathesis.Case)
    case.call_and_validate(checks=CHECKS, timeout=60)


@pytest.mark.parametrize("name", NAMES)
def test_answers_are_as_documented(cases: Cases, name: str) -> None:
    run_quick(cases[name], check, NUM_EXAMPLES[name])


@pytest.mark.slow
def test_answers_of_a_real_engine_are_as_documented_for_minutes(server: ServerProcess) -> None:
    cases = cases_of(server.base_url)
    del cases["post /pause"]  # what is asked after it would wait
    assert run_long(st.one_of(*cases.values()), check)
    assert server.is_running, server.last_log_lines()
