"""Two replicas on a real Ray of this machine, behind one address."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from lora_serve.demo.model import DemoPaths
from lora_serve.demo.scenarios import MODEL_NAME, Server, server_flags
from lora_serve.demo.server_process import ServerProcess
from tests.e2e.conftest import StartServer
from tests.e2e.metrics import wait_for
from tests.e2e.processes import descendants, pids_below
from tests.e2e.recording import Prompted, Recorded, client_for, record, record_alone
from tests.e2e.test_trace import random_ids

pytest.importorskip("ray.serve", reason="NO FLEET TESTED: Ray Serve is missing (extra fleet)")

PATIENCE_SECONDS = 120
REPLICA, ENGINE = b"ray::ServeReplica", b"spawn_main"
NAMES = (MODEL_NAME, "alpha", "beta")
ADMIN_KEY = "admin-of-two"


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "admin"
    file.write_text(ADMIN_KEY)
    file.chmod(0o600)
    return file


@pytest.fixture(scope="module")
def fleet(
    demo_paths: DemoPaths,
    tmp_path_factory: pytest.TempPathFactory,
    start_server: StartServer,
    key_file: Path,
) -> Iterator[ServerProcess]:
    flags = (
        *server_flags(Server.CACHED),
        *("--lora-modules", f"alpha={demo_paths.alpha}", f"beta={demo_paths.beta}"),
        *("--replicas", "2", "--cpu-threads", "1", "--drain-timeout", "60"),
        *("--admin-api-key-file", str(key_file)),
    )
    log = tmp_path_factory.mktemp("fleet") / "log"
    with start_server(demo_paths.model, log, *flags) as process:
        process.wait_until_healthy()
        yield process


@pytest.fixture
async def http(fleet: ServerProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with client_for(fleet.base_url) as client:
        client.headers.update(bearer(ADMIN_KEY))
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def counts(http: httpx.AsyncClient, name: str) -> dict[str, float]:
    """A metric of each replica that runs, summed over its other labels."""
    page = (await http.get("/metrics")).text
    found: dict[str, float] = {}
    for replica, value in re.findall(rf'^{name}{{replica="(.*?)".*}} (\S+)$', page, re.M):
        found[replica] = found.get(replica, 0) + float(value)
    return found


async def replica_ids(http: httpx.AsyncClient) -> set[str]:
    """The replicas that changes of adapters wait for."""
    return {one["id"] for one in (await http.get("/v1/replicas")).json()["data"]}


async def rollout(http: httpx.AsyncClient, name: str) -> int:
    """The serial of the change of a name that rolls out, or has."""
    card = (await http.get(f"/v1/models/{name}")).json()
    return int(card["rollout"]["serial"])


def requests_for(what: str, count: int, max_tokens: int = 16) -> list[Prompted]:
    return [
        Prompted(NAMES[i % 3], random_ids(f"fleet {what} {i}", 120), max_tokens)
        for i in range(count)
    ]


async def whole(http: httpx.AsyncClient, request: Prompted) -> Recorded:
    answer = await http.post("/v1/completions", json=request.body(stream=False))
    assert answer.status_code == 200, answer.text
    recorded = Recorded()
    recorded.add(answer.json())
    return recorded


class Stream:
    """A streamed answer as it comes. code: of the error that ended it, or 0."""

    def __init__(self, http: httpx.AsyncClient, request: Prompted) -> None:
        self.recorded = Recorded()
        self.has_begun = asyncio.Event()
        self.code = 0
        self.task = asyncio.create_task(self._read(http, request))

    async def _read(self, http: httpx.AsyncClient, request: Prompted) -> None:
        async with http.stream("POST", "/v1/completions", json=request.body()) as answer:
            assert answer.status_code == 200
            lines = [line async for line in self._told(answer) if line]
        assert lines[-1] == "data: [DONE]"

    async def _told(self, answer: httpx.Response) -> AsyncIterator[str]:
        async for line in answer.aiter_lines():
            yield line
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                self.code = chunk["error"]["code"]
                continue
            self.recorded.add(chunk)
            if self.recorded.token_ids:
                self.has_begun.set()


async def until_begun(*streams: Stream) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        for stream in streams:
            await stream.has_begun.wait()


@contextmanager
def slowed(pids: list[int]) -> Iterator[None]:
    """Processes get about a tenth of their time meanwhile, however busy this one is."""
    names = " ".join(map(str, pids))
    turn = f"kill -STOP {names}; sleep 0.045; kill -CONT {names}; sleep 0.005"
    with subprocess.Popen(["sh", "-c", f"while :; do {turn}; done 2>/dev/null"]) as loop:
        try:
            yield
        finally:
            loop.kill()
            loop.wait()
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


async def test_every_replica_gives_the_bits_of_a_single_server(
    http: httpx.AsyncClient, cold_server: ServerProcess, demo_paths: DemoPaths
) -> None:
    async with client_for(cold_server.base_url) as cold:
        for name, path in (("alpha", demo_paths.alpha), ("beta", demo_paths.beta)):
            body = {"lora_name": name, "lora_path": str(path), "load_inplace": True}
            assert (await cold.post("/v1/load_lora_adapter", json=body)).status_code == 200
    requests = requests_for("bits", 12)
    expected = await record_alone(cold_server.base_url, requests)
    before = await counts(http, "vllm:request_success_total")
    streamed = await asyncio.gather(*(record(http, request) for request in requests))
    at_once = await asyncio.gather(*(whole(http, request) for request in requests))
    for one, other, alone in zip(streamed, at_once, expected, strict=True):
        assert one.equals(alone)
        assert other.equals(alone)
        assert one.fingerprints == other.fingerprints == alone.fingerprints
    after = await counts(http, "vllm:request_success_total")
    assert len(after) == 2
    assert all(after[name] > before.get(name, 0) for name in after), "both have answered"


async def test_what_is_refused_is_refused_in_the_same_words(
    http: httpx.AsyncClient, cold_server: ServerProcess
) -> None:
    async with client_for(cold_server.base_url) as single:
        for method, path, body in (
            ("POST", "/v1/completions", {"model": MODEL_NAME, "prompt": [10**9]}),
            ("POST", "/v1/chat/completions", {"model": MODEL_NAME, "messages": "none"}),
            ("POST", "/v1/unload_lora_adapter", {"lora_name": "nobody"}),
            ("GET", "/v1/nothing", None),
            ("PUT", "/v1/models", None),
        ):
            both = [await each.request(method, path, json=body) for each in (single, http)]
            assert both[0].status_code == both[1].status_code >= 400
            assert both[0].json() == both[1].json()


async def test_a_client_that_leaves_ends_its_request_on_the_replica(
    http: httpx.AsyncClient,
) -> None:
    stream = Stream(http, Prompted(MODEL_NAME, random_ids("left", 40), 6000))
    await until_begun(stream)
    stream.task.cancel()
    async with asyncio.timeout(PATIENCE_SECONDS):
        while sum((await counts(http, "vllm:num_requests_running")).values()):
            await asyncio.sleep(0.2)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(REPLICA, id="a replica"),
        pytest.param(ENGINE, id="an engine", marks=pytest.mark.slow),
    ],
)
async def test_kill_9_costs_the_streams_that_have_begun_and_no_other_request(
    fleet: ServerProcess, http: httpx.AsyncClient, kind: bytes
) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(await counts(http, "vllm:num_requests_running")) < 2:
            await asyncio.sleep(0.5)  # both are there, and are known to be
    before = await replica_ids(http)
    requests = requests_for("killed", 8, 100)
    alone = await asyncio.gather(*(whole(http, request) for request in requests))
    longest = [replace(request, max_tokens=4000) for request in requests]
    victim = pids_below(fleet.pid, kind)[0]  # looked up before: that takes a while
    with slowed(pids_below(fleet.pid, ENGINE)):  # no stream ends before the last has begun
        streams = [Stream(http, each) for each in longest]
        await until_begun(*streams)
        answers = [asyncio.create_task(whole(http, each)) for each in requests]
        await asyncio.sleep(0)
        os.kill(victim, signal.SIGKILL)
    for answer, expected in zip(await asyncio.gather(*answers), alone, strict=True):
        assert answer.equals(expected)
    await asyncio.gather(*(stream.task for stream in streams))
    for stream, expected in zip(streams, alone, strict=True):
        num_known = len(expected.token_ids)
        assert (
            stream.recorded.token_ids[:num_known]
            == expected.token_ids[: len(stream.recorded.token_ids)]
        )
        assert stream.recorded.is_finished is not bool(stream.code)
    assert {stream.code for stream in streams} == {0, 503}, "one lost its streams, one did not"
    wait_for(
        lambda: len(pids_below(fleet.pid, kind)) >= 2 and victim not in pids_below(fleet.pid, kind),
        "another one in its place",
        PATIENCE_SECONDS,
    )
    if kind == REPLICA:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(before & await replica_ids(http)) != 1:
                await asyncio.sleep(0.5)  # it is waited for no longer


async def test_an_adapter_that_was_replaced_once_is_replaced_on_both(
    http: httpx.AsyncClient, demo_paths: DemoPaths
) -> None:
    requests = [Prompted("moved", random_ids(f"moved {i}", 60), 200) for i in range(24)]
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(await replica_ids(http)) != 2:
            await asyncio.sleep(0.5)
    answers = {}
    for name, path in (("alpha", demo_paths.alpha), ("beta", demo_paths.beta)):
        body = {"lora_name": "moved", "lora_path": str(path), "load_inplace": True}
        answer = await http.post("/v1/load_lora_adapter", json=body)
        assert answer.status_code == 200, answer.text
        assert "It is everywhere (2 replicas)" in answer.text, "no dead replica is waited for"
        before = await counts(http, "vllm:request_success_total")
        answers[name] = await asyncio.gather(*(whole(http, request) for request in requests))
        after = await counts(http, "vllm:request_success_total")
        assert all(after[replica] > before.get(replica, 0) for replica in after), (
            "both have answered"
        )
        (digests,) = {frozenset(a.fingerprints) for a in answers[name]}
        assert len(digests) == 1
    assert answers["alpha"][0].fingerprints != answers["beta"][0].fingerprints


async def test_replicas_are_no_background_jobs_and_each_writes_its_lines(
    fleet: ServerProcess, http: httpx.AsyncClient, demo_paths: DemoPaths
) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(await replica_ids(http)) != 2:
            await asyncio.sleep(0.5)
    for kind in (REPLICA, ENGINE):
        pids = pids_below(fleet.pid, kind)
        own = os.getpriority(os.PRIO_PROCESS, fleet.pid)
        assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in pids] == [own] * 2
    body = {"lora_name": "told", "lora_path": str(demo_paths.alpha)}
    for _ in range(2):
        serial = (await http.post("/v1/load_lora_adapter", json=body)).headers["X-LoRA-Serial"]
        told = f"adapter told of the catalog: serial {serial} "
        wait_for(
            lambda told=told: fleet.log_path.read_text().count(told) == 2,
            "a line of each replica",
            PATIENCE_SECONDS,
        )
        body |= {"lora_path": str(demo_paths.beta), "load_inplace": True}
    assert "\x1b[" not in fleet.log_path.read_text()


async def test_a_replica_that_is_killed_in_mid_roll_out_comes_back_with_the_new_version(
    fleet: ServerProcess, http: httpx.AsyncClient, demo_paths: DemoPaths
) -> None:
    """No answer after the call is of the version before, nor does the new replica give one."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while len(await replica_ids(http)) != 2:
            await asyncio.sleep(0.5)
    before = await replica_ids(http)
    victim = pids_below(fleet.pid, REPLICA)[0]

    async def load(path: Path) -> httpx.Response:
        body = {"lora_name": "rolled", "lora_path": str(path), "load_inplace": True}
        return await http.post("/v1/load_lora_adapter", json=body)

    requests = [Prompted("rolled", random_ids(f"rolled {i}", 60), 8) for i in range(8)]
    assert "It is everywhere (2 replicas)" in (await load(demo_paths.alpha)).text
    old, serial = await whole(http, requests[0]), await rollout(http, "rolled")
    with slowed(pids_below(fleet.pid, ENGINE)):  # so that it is not over before it was seen
        rolling = asyncio.create_task(load(demo_paths.beta))
        while await rollout(http, "rolled") == serial:
            assert not rolling.done(), "it was over before it was seen"
        os.kill(victim, signal.SIGKILL)
        told = await rolling
    # The replica that had the call may be the one that was killed: then it was made, or is told so.
    assert told.status_code in (200, 503), told.text
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            answers = await asyncio.gather(*(whole(http, request) for request in requests))
            is_old = [answer.fingerprints == old.fingerprints for answer in answers]
            assert told.status_code == 503 or not any(is_old)
            now = await replica_ids(http)
            if len(now) == 2 and len(now & before) == 1 and not any(is_old):
                break
    assert len({frozenset(answer.fingerprints) for answer in answers}) == 1
    assert "It is everywhere (2 replicas)" in (await load(demo_paths.alpha)).text


async def test_sighup_gives_every_replica_the_keys_that_now_lie_in_the_file(
    fleet: ServerProcess, http: httpx.AsyncClient, key_file: Path
) -> None:
    async def status(key: str) -> int:
        """The worst of all replicas' answers to a call with this key."""
        return (await http.post("/reset_prefix_cache", headers=bearer(key))).status_code

    assert (await status(ADMIN_KEY), await status("admin-of-three")) == (200, 401)
    key_file.write_text("admin-of-three")
    os.kill(fleet.pid, signal.SIGHUP)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await status("admin-of-three") != 200:
            await asyncio.sleep(0.2)
    assert await status(ADMIN_KEY) == 401
    key_file.write_text(ADMIN_KEY)
    os.kill(fleet.pid, signal.SIGHUP)
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await status(ADMIN_KEY) != 200:
            await asyncio.sleep(0.2)


async def test_an_end_lets_streams_end_and_leaves_no_process(
    fleet: ServerProcess, http: httpx.AsyncClient
) -> None:
    stream = Stream(http, Prompted(MODEL_NAME, random_ids("last", 40), 300))
    await until_begun(stream)
    family = [*descendants(fleet.pid)]
    assert len(family) > 5
    words = b"\0".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in family)
    homes = {Path(os.fsdecode(home)) for home in re.findall(rb"/[\w/]*/lora-serve-ray-\w+", words)}
    (home,) = (home for home in homes if home.exists())
    fleet.begin_to_stop()
    await stream.task
    assert (stream.recorded.is_finished, stream.code) == (True, 0)
    assert fleet.wait() == 0
    told = fleet.log_path.read_text().partition(": stopping: waiting for ")[2]
    assert told
    assert "(raylet)" not in told
    wait_for(
        lambda: not any(Path(f"/proc/{pid}").exists() for pid in family),
        "the end of every process",
        PATIENCE_SECONDS,
    )
    assert not home.exists(), "Ray leaves its sessions"
