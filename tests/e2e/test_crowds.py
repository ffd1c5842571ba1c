"""S4 over HTTP at its full size, and with merged weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_serve.cli.main import main
from lora_serve.demo.model import DemoPaths
from lora_serve.demo.server_process import ServerProcess
from tests.e2e.metrics import metric
from tests.e2e.recording import Prompted, record_alone, record_together
from tests.e2e.test_identical_requests import NUM_CACHED, NUM_TOKENS
from tests.e2e.test_trace import random_ids

NUM_BLOCKS = 44  # of 16 tokens: the prompt's 38 and a few tails


def crowd_server(model: Path, log: Path, *flags: str) -> ServerProcess:
    tight = ("--num-gpu-blocks-override", str(NUM_BLOCKS), "--max-model-len", "1024", "--validate")
    return ServerProcess(model, (*tight, *flags), log)


async def answer_a_crowd(server: ServerProcess, request: Prompted, count: int) -> None:
    """Every answer is right, and all but the first found the whole prefix."""
    server.wait_until_healthy()
    (expected,) = await record_alone(server.base_url, [request.salted("cold")])
    for begin in range(0, count, 500):  # as many connections at once
        together = await record_together(server.base_url, [request] * min(500, count - begin))
        assert all(recorded.equals(expected) for recorded in together)
        hits = [recorded.num_cached_tokens for recorded in together]
        assert sum(hit != NUM_CACHED for hit in hits) == (begin == 0)
    assert metric(server.base_url, "vllm:num_preemptions_total") == 0


async def test_merged_weights_answer_a_crowd_through_a_pool_smaller_than_the_context(
    demo_paths: DemoPaths, tmp_path: Path
) -> None:
    merged = tmp_path / "merged"
    assert main(["merge", str(demo_paths.model), str(demo_paths.alpha), str(merged)]) == 0
    with crowd_server(merged, tmp_path / "log", "--served-model-name", "merged") as server:
        request = Prompted("merged", random_ids("merged crowd", NUM_TOKENS), 4)
        await answer_a_crowd(server, request, 100)
        assert f"the KV cache holds {16 * NUM_BLOCKS} tokens" in server.log_path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["base", "alpha"])
async def test_thousands_of_equal_prompts_at_once(
    demo_paths: DemoPaths, tmp_path: Path, model: str
) -> None:
    flags = ("--served-model-name", "base", "--enable-lora")
    modules = ("--lora-modules", f"alpha={demo_paths.alpha}")
    with crowd_server(demo_paths.model, tmp_path / "log", *flags, *modules) as server:
        request = Prompted(model, random_ids("thousands", NUM_TOKENS), 4)
        await answer_a_crowd(server, request, 3000)
