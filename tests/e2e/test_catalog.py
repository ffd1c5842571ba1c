"""Two servers and a real Redis: an adapter replaced on one is replaced on both, whatever dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from lora_serve.demo.server_process import ServerProcess
from tests.e2e.conftest import StartServer
from tests.fakes.redis_server import RedisServer, running_redis

NAME = "tenant"
PATIENCE = 60
FLAGS = "--enable-lora --cpu-threads 1 --max-model-len 64 --num-gpu-blocks-override 32".split()


@dataclass(frozen=True)
class Told:
    """How a change ended. serial: 0 if it was refused."""

    end: float
    status: int
    serial: int = 0
    digest: str = ""
    rollout: str = ""
    text: str = ""


class Fleet:
    def __init__(self, redis: RedisServer, start: Callable[[str], ServerProcess]) -> None:
        self.redis = redis
        self.start = start
        self.servers = {name: start(name) for name in ("one", "two")}
        for server in self.servers.values():
            server.wait_until_healthy()

    def load(self, on: str, path: Path) -> Told:
        body = {"lora_name": NAME, "lora_path": str(path), "load_inplace": True}
        return self.post(on, "/v1/load_lora_adapter", body)

    def post(self, on: str, route: str, body: dict[str, object]) -> Told:
        response = httpx.post(
            self.servers[on].base_url + route, json=body, timeout=PATIENCE, verify=False
        )
        headers = response.headers
        return Told(
            time.monotonic(),
            response.status_code,
            int(headers.get("X-LoRA-Serial", "0")),
            headers.get("X-LoRA-Digest", ""),
            headers.get("X-LoRA-Rollout", ""),
            response.text,
        )

    def version(self, on: str) -> str:
        """Which digest answers, by its first digits; the status of a refusal."""
        body = {"model": NAME, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
        url = f"{self.servers[on].base_url}/v1/completions"
        response = httpx.post(url, json=body, timeout=PATIENCE, verify=False)
        if response.status_code != 200:
            return str(response.status_code)
        return str(response.json()["system_fingerprint"]).split("-")[1]

    def card(self, on: str) -> dict[str, object]:
        card = httpx.get(
            f"{self.servers[on].base_url}/v1/models/{NAME}", timeout=PATIENCE, verify=False
        ).json()
        return dict(card)

    def signal(self, on: str, number: signal.Signals) -> None:
        """Signal the server, whose engine goes on."""
        os.kill(self.servers[on].pid, number)


@pytest.fixture(scope="module")
def fleet(
    model_path: Path, start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleet]:
    logs, started = tmp_path_factory.mktemp("logs"), []

    def start(name: str) -> ServerProcess:
        flags = (*FLAGS, "--lora-catalog", redis.url, "--lora-replica-id", name)
        started.append(start_server(model_path, logs / f"{name}{len(started)}.log", *flags))
        return started[-1]

    with running_redis(tmp_path_factory) as redis:
        try:
            yield Fleet(redis, start)
        finally:
            for server in started:
                if server.is_running:
                    os.kill(server.pid, signal.SIGCONT)
                    server.begin_to_stop()
            for server in started:
                server.stop()


@contextmanager
def asking(fleet: Fleet, *names: str) -> Iterator[list[tuple[float, str, str]]]:
    """Ask all the time: when, whom, and which version answered."""
    answers: list[tuple[float, str, str]] = []
    is_over = threading.Event()

    def ask(name: str) -> None:
        while not is_over.is_set():
            begin = time.monotonic()
            answers.append((begin, name, fleet.version(name)))

    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(ask, name) for name in names]
        try:
            yield answers
        finally:
            is_over.set()
            for one in asked:
                one.result(PATIENCE)


def until(is_true: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.05)


def test_a_load_on_one_is_a_load_on_all(fleet: Fleet, adapter_paths: list[Path]) -> None:
    told = fleet.load("one", adapter_paths[0])
    assert (told.status, told.rollout) == (200, "everywhere"), told.text
    assert "It is everywhere (2 replicas)." in told.text
    assert fleet.version("one") == fleet.version("two") == told.digest[:12]
    rollout = fleet.card("two")["rollout"]
    assert isinstance(rollout, dict)
    assert (rollout["serial"], rollout["everywhere"]) == (told.serial, True)
    assert {one["replica"]: one["state"] for one in rollout["replicas"]} == {
        "one": "ready",
        "two": "ready",
    }


def test_two_operators_replace_one_name_at_once(fleet: Fleet, adapter_paths: list[Path]) -> None:
    """No answer is of a version from before a change that was everywhere when it was asked."""
    changes: list[Told] = [fleet.load("one", adapter_paths[0])]

    def operate(on: str, order: list[Path]) -> None:
        for path in order * 3:
            changes.append(fleet.load(on, path))

    with asking(fleet, "one", "two") as answers, ThreadPoolExecutor() as pool:
        operators = [
            pool.submit(operate, "one", adapter_paths),
            pool.submit(operate, "two", adapter_paths[::-1]),
        ]
        for operator in operators:
            operator.result(PATIENCE)
    assert all(told.status == 200 and told.rollout == "everywhere" for told in changes)
    serials: dict[str, list[int]] = {}
    for told in changes:
        serials.setdefault(told.digest[:12], []).append(told.serial)
    assert len(answers) > 10
    for begin, name, version in answers:
        claimed = max(told.serial for told in changes if told.end < begin)
        assert max(serials[version]) >= claimed, f"{name} answered with {version} at {begin}"
    last = max(changes, key=lambda told: told.serial)
    assert fleet.version("one") == fleet.version("two") == last.digest[:12]


def test_redis_is_killed_in_mid_roll_out(fleet: Fleet, adapter_paths: list[Path]) -> None:
    """It comes back empty: what was loaded is loaded, and changes reach all again."""
    before = fleet.load("one", adapter_paths[0])
    assert before.rollout == "everywhere"
    with asking(fleet, "one", "two") as answers:
        with ThreadPoolExecutor() as pool:
            rolling = [pool.submit(fleet.load, on, adapter_paths[1]) for on in ("one", "two")]
            fleet.redis.kill()
            in_between = [one.result(PATIENCE) for one in rolling]
        refused = fleet.load("two", adapter_paths[2])
        assert (refused.status, "nothing was changed anywhere" in refused.text) == (503, True)
        fleet.redis.start()
        until(lambda: fleet.load("two", adapter_paths[2]).rollout == "everywhere")
    assert all(told.status in (200, 503) for told in in_between)
    assert {version for _, _, version in answers}.isdisjoint({"404", "400"})
    assert fleet.version("one") == fleet.version("two") != before.digest[:12]


def test_a_server_that_was_stopped_is_named_and_asks_before_it_answers(
    fleet: Fleet, adapter_paths: list[Path]
) -> None:
    assert fleet.load("one", adapter_paths[0]).rollout == "everywhere"
    fleet.signal("two", signal.SIGSTOP)
    try:
        told = fleet.load("one", adapter_paths[1])
        assert (told.status, told.rollout) == (200, "incomplete")
        assert "not on two (not heard from" in told.text
        url = f"{fleet.servers['one'].base_url}/v1/replicas/two"
        assert httpx.delete(url, timeout=PATIENCE, verify=False).status_code == 200
        again = fleet.load("one", adapter_paths[1])
        assert again.rollout == "everywhere"
    finally:
        fleet.signal("two", signal.SIGCONT)
    assert fleet.version("two") == again.digest[:12]
    assert fleet.load("two", adapter_paths[2]).text.endswith("It is everywhere (2 replicas).")


def test_a_server_is_killed_and_another_takes_its_place(
    fleet: Fleet, adapter_paths: list[Path]
) -> None:
    before = fleet.load("one", adapter_paths[0])
    assert before.rollout == "everywhere"
    with ThreadPoolExecutor() as pool:
        rolling = pool.submit(fleet.load, "one", adapter_paths[1])
        fleet.signal("two", signal.SIGKILL)
        fleet.servers["two"].wait()
        fleet.servers["two"] = fleet.start("two")
        told = rolling.result(PATIENCE)
        assert told.status == 200
        assert told.rollout == "everywhere" or "not on two" in told.text
    fleet.servers["two"].wait_until_healthy()
    assert fleet.version("two") == fleet.version("one") == told.digest[:12]
    again = fleet.load("two", adapter_paths[2])
    assert again.rollout == "everywhere"
    assert "2 replicas" in again.text
