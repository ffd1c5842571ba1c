"""Every fault of a KV tier while requests run over HTTP: no answer changes by a bit.

One server a place, its device cache off, so that all KV goes through the tier. Cold answers are
each server's own, to the same prompts before anything was stored; the two servers must agree.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from lora_serve.demo.model import DemoPaths
from lora_serve.demo.server_process import ServerProcess
from tests.e2e.conftest import StartServer
from tests.e2e.metrics import metric, wait_for
from tests.e2e.test_kv_tiers import BLOCK_SIZE, Answer, ask, serving
from tests.e2e.tier_faults import DISK_FAULTS, REDIS_FAULTS, Fault, groups, mounted
from tests.fakes.redis_server import RedisServer, running_redis

NUM_TOKENS = 192
PROMPTS = tuple([3 + (i * step) % 700 for i in range(NUM_TOKENS)] for step in (1, 7, 11))
FLAGS = ("--kv-load-deadline-ms", "300")
FAST = (
    *(fault for fault in DISK_FAULTS if fault.name in {"full", "flipped"}),
    *(fault for fault in REDIS_FAULTS if fault.name in {"killed", "giving others' records"}),
)
SAVED = "lora_serve:kv_tier_saved_blocks_total"
COUNTS = tuple(
    f"lora_serve:kv_tier_{counted}_total"
    for counted in ("missed_blocks", "unsaved_blocks", "quarantined_files")
)


@dataclass
class Place:
    """A server over one tier, and the answers it gave before anything lay there."""

    server: ServerProcess
    tier: Any
    colds: list[Answer]
    callers: ThreadPoolExecutor

    def ask_all(self, salt: str) -> list[Future[Answer]]:
        """Each prompt twice, all at once."""
        return [
            self.callers.submit(ask, self.server, prompt=prompt, cache_salt=salt)
            for prompt in (*PROMPTS, *PROMPTS)
        ]

    def check(self, asked: Sequence[Future[Answer]]) -> int:
        """Hold that all are the cold answers; returns how many prompt tokens were found."""
        answers = [one.result(120) for one in asked]
        for answer, cold in zip(answers, (*self.colds, *self.colds), strict=True):
            assert answer.same_as(cold)
        return sum(answer.found for answer in answers)

    def store(self, *salts: str) -> None:
        """So that nothing else lies in the tier, and on disk each salt's KV in other files."""
        reply = httpx.post(f"{self.server.base_url}/reset_prefix_cache", timeout=30)
        assert reply.status_code == 200, reply.text
        for salt in salts:
            self._store(salt)

    def _store(self, salt: str) -> None:
        wanted = metric(self.server.base_url, SAVED) + len(PROMPTS) * (NUM_TOKENS // BLOCK_SIZE)
        num_files = self._num_files()
        self.check(self.ask_all(salt))
        wait_for(lambda: metric(self.server.base_url, SAVED) >= wanted, "the KV to be stored")
        if isinstance(self.tier, Path):
            wait_for(lambda: self._num_files() > num_files, "a file of its own")

    def _num_files(self) -> int:
        return len(groups(self.tier)) if isinstance(self.tier, Path) else 0

    def count(self, causes: Sequence[str]) -> float:
        """How often the tier, or what lay in it, was blamed with one of these."""
        url = f"{self.server.base_url}/metrics"
        lines = httpx.get(url, timeout=30, verify=False).text.splitlines()
        return sum(
            float(line.split()[-1])
            for line in lines
            if line.startswith(COUNTS) and any(f'cause="{cause}"' in line for cause in causes)
        )


@contextmanager
def opened(
    start: StartServer, paths: DemoPaths, log: Path, tier: object, *flags: str
) -> Iterator[Place]:
    with serving(start, paths, log, *flags, *FLAGS) as server, ThreadPoolExecutor(6) as callers:
        colds = [ask(server, prompt=prompt, cache_salt="cold") for prompt in PROMPTS]
        assert not any(cold.found for cold in colds)
        yield Place(server, tier, colds, callers)


@pytest.fixture(scope="module")
def disk(
    demo_paths: DemoPaths, start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("faults")
    disk = directory / "disk"
    disk.mkdir()
    is_mounted = mounted("-t", "tmpfs", "-o", "size=48m", "tmpfs", str(disk))
    path = disk / "kv"
    try:
        flags = ("--kv-disk-path", str(path))
        with opened(start_server, demo_paths, directory / "log", path, *flags) as place:
            yield place
    finally:
        if is_mounted:
            subprocess.run(("umount", "--lazy", str(disk)), check=True)


@pytest.fixture(scope="module")
def redis(
    demo_paths: DemoPaths, start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    with running_redis(tmp_path_factory) as server:
        log = tmp_path_factory.mktemp("faults") / "log"
        flags = ("--kv-redis-url", server.url)
        with opened(start_server, demo_paths, log, server, *flags) as place:
            yield place


def table(faults: Sequence[Fault]) -> list[Any]:
    """The few that differ most in every run of the tests, all of them with -m slow."""
    marks = [() if fault in FAST else (pytest.mark.slow,) for fault in faults]
    return [
        pytest.param(fault, marks=mark, id=str(fault))
        for fault, mark in zip(faults, marks, strict=True)
    ]


def go_through(place: Place, fault: Fault) -> None:
    salt = f"while it is {fault}"
    place.store(salt, f"{salt}, and others")
    wait_for(lambda: place.check(place.ask_all(salt)) > 0, "the tier to be used")
    before = place.count(fault.sees)
    running = place.ask_all(salt)
    with fault.put(place.tier):
        place.check(running)

        def is_noticed() -> bool:
            """A tier that is left alone after another fault is asked later."""
            for asked in (salt, f"{salt}, another"):
                place.check(place.ask_all(asked))
            return not fault.sees or place.count(fault.sees) > before

        wait_for(is_noticed, f"one of {fault.sees} to be counted", 90)
    place.check(place.ask_all(salt))

    def is_used_again() -> bool:
        return place.check(place.ask_all(f"after it was {fault}")) > 0

    wait_for(is_used_again, "the tier to be used again", 90)


@pytest.mark.parametrize("fault", table(DISK_FAULTS))
def test_answers_are_the_cold_ones_while_the_disk_is(disk: Place, fault: Fault) -> None:
    go_through(disk, fault)


@pytest.mark.parametrize("fault", table(REDIS_FAULTS))
def test_answers_are_the_cold_ones_while_redis_is(redis: Place, fault: Fault) -> None:
    assert isinstance(redis.tier, RedisServer)
    go_through(redis, fault)


def test_the_servers_over_both_tiers_agree(disk: Place, redis: Place) -> None:
    assert all(one.same_as(other) for one, other in zip(disk.colds, redis.colds, strict=True))
