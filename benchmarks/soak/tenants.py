"""Names whose adapters change under traffic, and which versions each may answer with when.

A load that fails with its engine may or may not have happened, so both versions are possible until
a later call has succeeded.
"""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from benchmarks.soak.cold_answers import post
from benchmarks.soak.versions import Version, overwrite
from lora_serve.bench.http_stream import HttpFault, Origin

KEPT_SECONDS = 600.0  # longer than any question takes


@dataclass(slots=True)
class Span:
    """When something may have been so, on the monotonic clock."""

    what: str
    begin: float
    end: float = math.inf

    def meets(self, begin: float, end: float) -> bool:
        return self.begin <= end and begin <= self.end


@dataclass(slots=True)
class Tenant:
    """path: where its adapter is overwritten, or None if each version is loaded from its own."""

    name: str
    path: Path | None
    versions: list[Span] = field(default_factory=list)
    unreadable: list[Span] = field(default_factory=list)  # its files are not what was loaded
    absent: list[Span] = field(default_factory=list)
    is_changing: bool = False

    def may_answer(self, digest: str, begin: float, end: float) -> bool:
        return any(span.what == digest and span.meets(begin, end) for span in self.versions)

    def may_be_absent(self, begin: float, end: float) -> bool:
        return any(span.meets(begin, end) for span in self.absent)

    def may_be_unreadable(self, begin: float, end: float) -> bool:
        return any(span.meets(begin, end) for span in self.unreadable)

    def forget_before(self, moment: float) -> None:
        for spans in (self.versions, self.unreadable, self.absent):
            spans[:] = [span for span in spans if span.end >= moment]


class Landlord:
    """Loads, replaces and unloads the tenants' adapters."""

    def __init__(self, origin: Origin, versions: list[Version], directory: Path, count: int):
        """Every other tenant's adapter is overwritten where it lies."""
        self._origin = origin
        self.versions = versions
        self.tenants = [
            Tenant(f"tenant-{index}", directory / f"tenant-{index}" if index % 2 else None)
            for index in range(count)
        ]
        self.num_loads = 0

    async def load(self, tenant: Tenant, rng: Random) -> list[str]:
        """Load a random version in place, again and again until it succeeds; what went wrong."""
        version, faults = rng.choice(self.versions), []
        tenant.is_changing = True
        begin = time.monotonic()
        tenant.versions.append(Span(version.digest, begin))
        source = version.path
        assert source is not None, "the base model is no tenant's"
        if tenant.path is not None:
            tenant.unreadable.append(Span("", begin))
            overwrite(tenant.path, source)
            source = tenant.path
        body = {"lora_name": tenant.name, "lora_path": str(source), "load_inplace": True}
        while (status := await self._call("/v1/load_lora_adapter", body))[0] != 200:
            faults.append(f"{status[0]}: {status[1]}")
            await _pause(rng)
        self._settle(tenant, version.digest)
        self.num_loads += 1
        return faults

    async def unload(self, tenant: Tenant, rng: Random) -> list[str]:
        """Unload it, until that is so, and load a version again."""
        tenant.is_changing = True
        tenant.absent.append(Span("", time.monotonic()))
        body: dict[str, object] = {"lora_name": tenant.name}
        faults = []
        while (status := await self._call("/v1/unload_lora_adapter", body))[0] not in (200, 404):
            faults.append(f"{status[0]}: {status[1]}")
            await _pause(rng)
        return faults + await self.load(tenant, rng)

    async def _call(self, path: str, body: dict[str, object]) -> tuple[int, str]:
        try:
            return await post(self._origin, path, body)
        except (OSError, HttpFault) as error:
            return 0, f"{type(error).__name__}: {error}"

    def _settle(self, tenant: Tenant, digest: str) -> None:
        """The last load has succeeded: from now on there is but one version."""
        now = time.monotonic()
        *older, newest = tenant.versions
        for span in [*older, *tenant.unreadable, *tenant.absent]:
            span.end = min(span.end, now)
        assert newest.what == digest, "one change at a time"
        tenant.forget_before(now - KEPT_SECONDS)
        tenant.is_changing = False


async def _pause(rng: Random) -> None:
    await asyncio.sleep(rng.uniform(0.2, 0.6))
