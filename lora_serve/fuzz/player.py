"""Plays a trace against one server and notes the outcome of each event. Judges nothing."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from lora_serve.errors import ConfigError
from lora_serve.fuzz.answers import Called, CalledAtOnce, Heard
from lora_serve.fuzz.bodies import body, route
from lora_serve.fuzz.client import FuzzClient
from lora_serve.fuzz.faults import damage_files, kill_engine
from lora_serve.fuzz.talk_answers import kept_items
from lora_serve.fuzz.trace import (
    Abort,
    AdapterCall,
    Ask,
    ConcurrentCalls,
    Damage,
    Kill,
    Load,
    PauseAndResume,
    Reset,
    Talk,
    Trace,
    Unload,
)
from lora_serve.fuzz.versions import overwrite

RESTART_SECONDS = 120.0
POLL_SECONDS = 0.1
RESTARTS = "lora_serve:engine_restarts_total"

Record = Heard | Called | CalledAtOnce


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerUnderTest:
    """The server that a trace is played on, with what goes with it.

    versions: the library's directories. workspace: for adapters that overwrite each other.
    prefix: of names, salts and requests' ids, so that traces on one server have nothing in common.
    server_pid, disk: what faults need; None where the trace has none.
    """

    client: FuzzClient
    base_model: str
    hidden_size: int
    versions: Sequence[Path]
    workspace: Path
    prefix: str = ""
    server_pid: int | None = None
    disk: Path | None = None


class Player:
    """Plays one trace, once."""

    def __init__(self, server: ServerUnderTest) -> None:
        self._server = server
        self._pausing = asyncio.Lock()  # one pause at a time, so that none ends another
        self._stored: dict[str, asyncio.Future[Heard]] = {}  # by label
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def play(self, trace: Trace) -> list[Record]:
        """Play it all; returns the outcome of each event, in order."""
        places = asyncio.Semaphore(trace.concurrency)
        tasks: list[asyncio.Task[Record]] = []
        async with asyncio.TaskGroup() as group:
            for index, event in enumerate(trace.events):
                await asyncio.sleep(event.wait_ms / 1000)
                await places.acquire()
                task = group.create_task(self._take(trace, index))
                task.add_done_callback(lambda _: places.release())
                tasks.append(task)
                if isinstance(event, Kill):
                    await task
                else:
                    await asyncio.sleep(0)  # it begins now, so operators' calls keep their order
        return [task.result() for task in tasks]

    async def _take(self, trace: Trace, index: int) -> Record:
        match event := trace.events[index]:
            case Ask(talk=Talk(stored_as=label)) if label:
                self._stored[label] = asyncio.get_running_loop().create_future()
                heard = await self._ask(event, self._request_id(index))
                self._stored[label].set_result(heard)
                return heard
            case Ask():
                return await self._ask(event, self._request_id(index))
            case Load() | Unload() | Reset():
                return await self._call_in_turn(event)
            case Abort(newest=None):
                return await self._server.client.call("/abort_requests", {})
            case Abort():
                ids = list(map(self._request_id, trace.aborted_by(index)))
                return await self._server.client.call("/abort_requests", {"request_ids": ids})
            case ConcurrentCalls():
                return await self._call_at_once(event)
            case Kill():
                return await self._kill()
            case PauseAndResume():
                async with self._pausing:
                    return await self._pause(event)
            case Damage():
                return self._damage(event)

    async def _ask(self, ask: Ask, request_id: str) -> Heard:
        server = self._server
        model = self._named(ask.lora_name) if ask.lora_name else server.base_model
        salt = f"{server.prefix}{ask.cache_salt}"
        leaves_ms = ask.leaves_after_ms
        sent = body(ask, model, salt, server.hidden_size)
        before = await self._before(ask)
        if before is not None:
            sent["previous_response_id"] = before.response_id
        heard = await server.client.ask(
            route(ask),
            sent,
            api_key=ask.api_key,
            request_id=request_id,
            leaves_after_tokens=ask.leaves_after_tokens,
            leaves_after_seconds=leaves_ms / 1000 if leaves_ms is not None else None,
        )
        heard.api_key, heard.input = ask.api_key, sent.get("input", [])
        if before is not None:
            heard.continues_anothers = before.api_key != ask.api_key
            heard.history = [] if heard.continues_anothers else kept_items(before)
        return heard

    async def _before(self, ask: Ask) -> Heard | None:
        """The response that this one continues, once it has been answered to its end."""
        label = ask.talk.continues if ask.talk is not None else ""
        if label not in self._stored:
            return None
        before = await self._stored[label]
        return before if before.is_whole and not before.is_aborted else None

    async def _call_in_turn(self, event: AdapterCall) -> Called:
        """Send a call once those of its name have ended; a reset of all waits for none."""
        if event.lora_name is None:
            return await self._call(event)
        async with self._locks[event.lora_name]:
            return await self._call(event)

    async def _call_at_once(self, event: ConcurrentCalls) -> CalledAtOnce:
        async with AsyncExitStack() as stack:
            for name in sorted({call.lora_name for call in event.calls if call.lora_name}):
                await stack.enter_async_context(self._locks[name])
            return CalledAtOnce(tuple(await asyncio.gather(*map(self._call, event.calls))))

    async def _call(self, event: AdapterCall) -> Called:
        name = self._named(event.lora_name) if event.lora_name else ""
        if isinstance(event, Reset):
            body = {"lora_name": name} if name else {}
            return await self._server.client.call("/reset_prefix_cache", body)
        if isinstance(event, Unload):
            return await self._server.client.call("/v1/unload_lora_adapter", {"lora_name": name})
        begin = time.monotonic()
        path = self._server.versions[event.version]
        if event.place:
            version, path = path, self._server.workspace / event.lora_name / event.place
            overwrite(path, version)
        fields = {"lora_name": name, "lora_path": str(path), "load_inplace": event.in_place}
        called = await self._server.client.call("/v1/load_lora_adapter", fields)
        return Called(begin, called.end, called.status, called.message)

    async def _kill(self) -> Called:
        begin = time.monotonic()
        assert self._server.server_pid is not None, "a server at a URL is not killed"
        client = self._server.client
        num_before = (await client.metrics()).get(RESTARTS, 0.0)
        kill_engine(self._server.server_pid)
        # The server may take a while to notice, and is healthy until then.
        while (await client.metrics()).get(RESTARTS, 0.0) <= num_before:
            if time.monotonic() - begin > RESTART_SECONDS:
                message = f"no new engine after {RESTART_SECONDS:.0f} s"
                return Called(begin, time.monotonic(), 0, message)
            await asyncio.sleep(POLL_SECONDS)
        return Called(begin, time.monotonic())

    async def _pause(self, event: PauseAndResume) -> Called:
        """Pause and resume; the outcome of the call that failed, if one did.

        While a killed engine is being started again, a pause may fail, and a resume is repeated.
        """
        client = self._server.client
        paused = await client.call(f"/pause?mode={event.mode}", {})
        await asyncio.sleep(event.pause_ms / 1000)
        resumed = await client.call("/resume", {})
        while resumed.status == 503 and resumed.end - paused.end < RESTART_SECONDS:
            await asyncio.sleep(POLL_SECONDS)
            resumed = await client.call("/resume", {})
        worse = resumed if paused.is_done else paused
        return Called(paused.begin, resumed.end, worse.status, worse.message)

    def _damage(self, event: Damage) -> Called:
        begin = time.monotonic()
        assert self._server.disk is not None, "only the disk tier's files are damaged"
        damage_files(self._server.disk, event.seed)
        return Called(begin, time.monotonic())

    def _request_id(self, event: int) -> str:
        return f"{self._server.prefix}event-{event}"

    def _named(self, lora_name: str) -> str:
        return f"{self._server.prefix}{lora_name}"


def check_playable(trace: Trace, server: ServerUnderTest) -> None:
    """Raise ConfigError for a trace whose faults or versions this server cannot play."""
    for event in trace.events:
        if isinstance(event, Kill) and server.server_pid is None:
            raise ConfigError("the trace kills engines; a server at --url is not the fuzzer's own")
        if isinstance(event, Ask) and event.api_key >= server.client.num_api_keys:
            raise ConfigError("the trace has requests of two API keys; at --url there is one")
    for load in trace.loads:
        if load.version >= len(server.versions):
            raise ConfigError(
                f"the trace has a version {load.version}, here are {len(server.versions)}; give "
                "the same --adapters"
            )
