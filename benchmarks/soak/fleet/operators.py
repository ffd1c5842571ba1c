"""Changes of names: loads of new bytes, of earlier ones, unloads, and calls that are to fail."""

from __future__ import annotations

import asyncio
import re
import time
from collections import defaultdict, deque
from pathlib import Path
from random import Random

import httpx

from benchmarks.soak.fleet.clients import Names
from benchmarks.soak.fleet.history import ABSENT, UNTOLD, Change
from benchmarks.soak.fleet.journal import (
    EVERYWHERE,
    INCOMPLETE,
    NOT_TOLD,
    REFUSED,
    UNEXPECTED,
    Journal,
)
from benchmarks.soak.fleet.replicas import Replicas
from benchmarks.soak.fleet.troubles import Troubles
from benchmarks.soak.fleet.versions import Version, Versions

NUM_KEPT = 4  # versions of a name that it may go back to
HOT_SHARE = 0.7  # of all changes
NOT_CONNECTED = -1  # in place of a status
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_SERIAL = re.compile(r"was changed \(serial (\d+)\)")


class Operators:
    def __init__(
        self,
        replicas: Replicas,
        names: Names,
        versions: Versions,
        journal: Journal,
        troubles: Troubles,
        http: httpx.AsyncClient,
    ) -> None:
        self._replicas = replicas
        self._names = names
        self._versions = versions
        self._journal = journal
        self._troubles = troubles
        self._http = http
        self._is_over = False
        self._earlier: defaultdict[str, deque[Version]] = defaultdict(
            lambda: deque(maxlen=NUM_KEPT)
        )

    async def load_all(self, num_at_once: int) -> None:
        """Give every name its first version."""
        names = iter(self._names.all)

        async def load(number: int) -> None:
            for name in names:
                url = self._replicas.urls[number % len(self._replicas.urls)]
                await self.load(url, name, self._versions.new())

        async with asyncio.TaskGroup() as group:
            for number in range(num_at_once):
                group.create_task(load(number))

    async def run(self, seed: str, pause_seconds: float) -> None:
        """Make one change after the other, until `end`; the last one is waited for."""
        rng = Random(seed)
        while not self._is_over:
            await asyncio.sleep(rng.expovariate(1 / pause_seconds))
            await self.change(rng)

    def end(self) -> None:
        self._is_over = True

    async def change(self, rng: Random) -> None:
        """Make one change, on any replica."""
        url = rng.choice(self._replicas.urls)
        is_hot = rng.random() < HOT_SHARE
        name = rng.choice(self._names.hot) if is_hot else self._names.draw(rng)
        kind = rng.random()
        if kind < 0.1:
            await self.unload(url, name)
        elif kind < 0.15:
            await self._load_in_vain(url, name)
        elif kind < 0.25 and self._earlier[name]:
            await self.load(url, name, rng.choice(self._earlier[name]))
        else:
            await self.load(url, name, self._versions.new(), load_inplace=kind > 0.3)

    async def load(
        self, url: str, name: str, version: Version, *, load_inplace: bool = True
    ) -> None:
        body = {"lora_name": name, "lora_path": str(version.path), "load_inplace": load_inplace}
        if await self._post(url, LOAD, body, name, version.digest):
            self._earlier[name].append(version)

    async def unload(self, url: str, name: str) -> None:
        await self._post(url, UNLOAD, {"lora_name": name}, name, ABSENT)

    async def _load_in_vain(self, url: str, name: str) -> None:
        """Load from a directory that is not there: nothing may change for it."""
        path = str(self._versions.directory / "nothing" / str(Path(name)))
        body = {"lora_name": name, "lora_path": path, "load_inplace": True}
        if await self._post(url, LOAD, body, name, "nothing"):
            self._journal.blame(UNEXPECTED, f"{name} was loaded from where nothing is")

    async def _post(
        self, url: str, route: str, body: dict[str, object], name: str, version: str
    ) -> bool:
        """Make a call and note what it told; whether it was done."""
        begin = time.monotonic()
        try:
            response = await self._http.post(url + route, json=body)
            status, text, headers = response.status_code, response.text, response.headers
        except httpx.ConnectError:
            status, text, headers = NOT_CONNECTED, "", httpx.Headers()
        except httpx.TransportError as error:
            status, text, headers = 0, f"{type(error).__name__}: {error}", httpx.Headers()
        end = time.monotonic()
        if status in (400, 404, NOT_CONNECTED):
            self._journal.done[REFUSED] += 1
            return False
        if status != 200 and not self._troubles.met_any(begin, end):
            self._journal.blame(UNEXPECTED, f"{route} of {name}: {status} {text}")
        if "nothing was changed anywhere" in text:
            self._journal.done[REFUSED] += 1
            return False
        written = _SERIAL.search(text)
        serial = int(written[1]) if written else int(headers.get("X-LoRA-Serial", UNTOLD))
        is_everywhere = headers.get("X-LoRA-Rollout") == "everywhere"
        if status == 200 and not is_everywhere and not self._troubles.met_any(begin, end):
            self._journal.blame(UNEXPECTED, f"{route} of {name}: {text}")
        kind = EVERYWHERE if is_everywhere else INCOMPLETE if serial else NOT_TOLD
        self._journal.note_change(kind, Change(name, version, begin, end, serial, is_everywhere))
        return status == 200
