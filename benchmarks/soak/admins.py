"""Admins who change one name at once: any order will do, but a name stands for what was loaded.

The name is one that no client asks for, so that what each call found there is of no matter.
"""

from __future__ import annotations

import asyncio
import json
from random import Random

from benchmarks.soak.cold_answers import post
from benchmarks.soak.samples import get
from benchmarks.soak.versions import Version
from lora_serve.bench.http_stream import HttpFault, Origin

NAME = "raced"
NUM_CALLS = 6
MAY_ANSWER = (200, 400, 404)  # 400 of an older load that a newer one overtook


async def race(origin: Origin, versions: list[Version], rng: Random) -> list[str]:
    """Load, unload and reset a name all at once; what went wrong."""
    calls = [_call(origin, rng.choice(versions), rng) for _ in range(NUM_CALLS)]
    faults = [fault for fault in await asyncio.gather(*calls) if fault]
    shown = await shown_digest(origin)
    if shown and not any(shown.startswith(version.digest) for version in versions):
        faults.append(f"{NAME} stands for {shown}, which was never loaded")
    return faults


async def _call(origin: Origin, version: Version, rng: Random) -> str:
    """One admin's call; "" if it was answered as it may be."""
    path, body = rng.choice(
        [
            (
                "/v1/load_lora_adapter",
                {"lora_name": NAME, "lora_path": str(version.path), "load_inplace": True},
            ),
            ("/v1/unload_lora_adapter", {"lora_name": NAME}),
            ("/reset_prefix_cache", {"lora_name": NAME}),
        ]
    )
    try:
        status, text = await post(origin, path, body)
    except (OSError, HttpFault) as error:
        status, text = 0, repr(error)
    return "" if status in MAY_ANSWER or _waits_for_redis(text) else f"{path}: {status} {text}"


def _waits_for_redis(text: str) -> bool:
    return "not yet forgotten by redis" in text


async def shown_digest(origin: Origin) -> str:
    """What the name stands for; "" if it is not there, or no server answers."""
    text = await get(origin, "/v1/models")
    cards = json.loads(text).get("data", []) if text else []
    return next((card["digest"] for card in cards if card["id"] == NAME), "")
