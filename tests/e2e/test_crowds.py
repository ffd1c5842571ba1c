"""Thousands of equal prompts over HTTP, also with merged weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_serve.cli.main import main
from lora_serve.demo.model import DemoPaths
from lora_serve.demo.server_process import ServerProcess
from tests.e2e.conftest import StartServer
from tests.e2e.metrics import metric
from tests.e2e.recording import Prompted, record_alone, record_together
from tests.e2e.test_identical_requests import NUM_CACHED, NUM_TOKENS
from tests.e2e.test_trace import random_ids

NUM_BLOCKS = 44  # of 16 tokens: the prompt's 38 and a few tails


def crowd_server(start: StartServer, model: Path, log: Path, *flags: str) -> ServerProcess:
    tight = ("--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-model-len", "1024", "--validate")
    return start(model, log, *tight, *flags)


async def answer_a_crowd(server: ServerProcess, request: Prompted, count: int) -> None:
    """Every answer is right, and all but the first found the whole prefix."""
    server.wait_until_healthy()
    (expected,) = await record_alone(server.base_url, [request.salted("cold")])
    together = await record_together(server.base_url, [request] * count)
    assert all(recorded.equals(expected) for recorded in together)
    hits = sorted(recorded.num_cached_tokens for recorded in together)
    assert hits == [0] + [NUM_CACHED] * (count - 1)
    assert metric(server.base_url, "vllm:num_preemptions_total") == 0


@pytest.fixture
def merged(demo_paths: DemoPaths, tmp_path: Path) -> Path:
    out = tmp_path / "merged"
    assert main(["merge", str(demo_paths.model), str(demo_paths.alpha), str(out)]) == 0
    return out


async def test_merged_weights_answer_a_crowd_through_a_pool_smaller_than_the_context(
    merged: Path, start_server: StartServer, tmp_path: Path
) -> None:
    named = ("--served-model-name", "merged")
    with crowd_server(start_server, merged, tmp_path / "log", *named) as server:
        request = Prompted("merged", random_ids("merged crowd", NUM_TOKENS), 4)
        await answer_a_crowd(server, request, 100)
        assert (
            f"the KV cache holds requests of {16 * NUM_BLOCKS} tokens"
            in server.log_path.read_text()
        )


PATIENT = ("--request-head-timeout", "0")  # the test's own client is slow to send them all


@pytest.mark.slow
@pytest.mark.parametrize("model", ["base", "alpha"])
async def test_thousands_of_equal_prompts_at_once(
    demo_paths: DemoPaths, start_server: StartServer, tmp_path: Path, model: str
) -> None:
    named = (*PATIENT, "--served-model-name", "base")
    flags = (*named, "--enable-lora", "--lora-modules", f"alpha={demo_paths.alpha}")
    with crowd_server(start_server, demo_paths.model, tmp_path / "log", *flags) as server:
        request = Prompted(model, random_ids("thousands", NUM_TOKENS), 4)
        await answer_a_crowd(server, request, 3000)


@pytest.mark.slow
async def test_thousands_of_equal_prompts_at_once_for_merged_weights(
    merged: Path, start_server: StartServer, tmp_path: Path
) -> None:
    named = (*PATIENT, "--served-model-name", "merged")
    with crowd_server(start_server, merged, tmp_path / "log", *named) as server:
        request = Prompted("merged", random_ids("thousands", NUM_TOKENS), 4)
        await answer_a_crowd(server, request, 3000)
