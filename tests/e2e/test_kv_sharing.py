"""Two servers, each a replica with an engine process of its own, write one place at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lora_serve.cli.main import main
from lora_serve.demo.model import DemoPaths
from lora_serve.demo.server_process import ServerProcess
from tests.e2e.conftest import StartServer
from tests.e2e.metrics import metric, wait_for
from tests.e2e.test_kv_tiers import (
    BLOCK_SIZE,
    QUICK_PLACES,
    Answer,
    ask,
    end_it,
    num_findable,
    place,
    serving,
)
from tests.fakes.redis_server import redis_server

__all__ = ["place", "redis_server"]

NUM_TOKENS = 192
PROMPTS = tuple([3 + (i * step) % 700 for i in range(NUM_TOKENS)] for step in (1, 7, 11))
NUM_BLOCKS = len(PROMPTS) * NUM_TOKENS // BLOCK_SIZE
NUM_ROUNDS = 6
SAVED, KNOWN = "lora_serve:kv_tier_saved_blocks_total", "lora_serve:kv_tier_blocks"


@pytest.mark.parametrize("place", QUICK_PLACES, indirect=True)
def test_two_servers_share_one_place_and_one_outlives_the_other(
    demo_paths: DemoPaths, start_server: StartServer, place: tuple[str, str], tmp_path: Path
) -> None:
    logs = tmp_path / "one.log", tmp_path / "two.log"
    with (
        serving(start_server, demo_paths, logs[0], *place) as one,
        serving(start_server, demo_paths, logs[1], *place) as two,
        ThreadPoolExecutor(2 * len(PROMPTS)) as callers,
    ):
        colds = [ask(one, prompt=prompt, cache_salt="cold") for prompt in PROMPTS]

        def check(server: ServerProcess, salt: str) -> int:
            """Hold that each answer is the cold one; returns how many prompt tokens were found."""
            answers: list[Answer] = list(
                callers.map(lambda prompt: ask(server, prompt=prompt, cache_salt=salt), PROMPTS)
            )
            for answer, cold in zip(answers, colds, strict=True):
                assert answer.same_as(cold)
            return sum(answer.found for answer in answers)

        # counts begin with the cold KV, which one has saved
        for writer, reader, num_saved, num_known in ((one, two, 2, 2), (two, one, 1, 3)):
            salt = f"of {writer.base_url}"
            assert check(writer, salt) == 0
            wait_until_counted(writer, SAVED, num_saved * NUM_BLOCKS)
            if place[0] == "--kv-disk-path":  # what Redis holds is not known
                wait_until_counted(reader, KNOWN, num_known * NUM_BLOCKS)
            assert check(reader, salt) == len(PROMPTS) * num_findable(NUM_TOKENS)
        with ThreadPoolExecutor(2) as both:
            for number in range(NUM_ROUNDS):
                list(both.map(check, (one, two), [f"round {number}"] * 2))
        end_it(one)
        assert check(two, f"of {one.base_url}") == len(PROMPTS) * num_findable(NUM_TOKENS)
        assert main(["kv", "verify", place[1]]) == 0


def wait_until_counted(server: ServerProcess, name: str, least: float) -> None:
    wait_for(lambda: metric(server.base_url, name) >= least, f"{name} to reach {least}")
