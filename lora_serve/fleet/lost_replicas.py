"""Replicas that have ended without signing off from the catalog: no roll-out is to wait for them.

Every replica looks for the others that are silent. What has become of them is told by who runs
them.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from lora_serve.catalog.rollout import LEASE_SECONDS
from lora_serve.errors import LoraServeError
from lora_serve.server.adapter_names.base import AdapterNames

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0


@asynccontextmanager
async def lost_ones_forgotten(
    names: AdapterNames, is_gone: Callable[[str], bool], look_seconds: float = LOOK_SECONDS
) -> AsyncIterator[None]:
    """Have replicas forgotten once they are gone, as long as this lasts.

    Args:
        is_gone: by the name that the catalog has; may block.
    """
    if not names.is_shared:
        yield
        return
    task = asyncio.create_task(_keep_looking(names, is_gone, look_seconds), name="lost-replicas")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


def run_of(place: str) -> str:
    """A name for this start of a fleet at a place, where no two run at once."""
    return f"{place}@{uuid.uuid4().hex[:12]}"


def is_gone(run: str, is_running: Callable[[str], bool], replica: str) -> bool:
    """Whether a replica, as the catalog calls it, was this fleet's and has ended.

    Those of earlier starts at the same place have: they ended with the server before them.

    Args:
        run: from `run_of`, or what else names the fleet that this process is of.
        is_running: whether there is an actor of this name in it; may block.
    """
    other, _, actor = replica.rpartition("/")
    if other == run:
        return not is_running(actor)
    place, is_started_here, _ = run.rpartition("@")
    return bool(is_started_here) and other.rpartition("@")[0] == place


async def _keep_looking(
    names: AdapterNames, is_gone: Callable[[str], bool], look_seconds: float
) -> None:
    while True:
        await asyncio.sleep(look_seconds)
        try:
            await _look(names, is_gone)
        except LoraServeError:  # no store now, or another one was first
            pass
        except Exception:  # of who is asked, which may have lost what it knew by
            logger.exception("what has become of silent replicas is not known")


async def _look(names: AdapterNames, is_gone: Callable[[str], bool]) -> None:
    for standing in await names.standings():
        replica_id = standing.member.replica_id
        if standing.silent_seconds <= LEASE_SECONDS or replica_id == names.replica_id:
            continue
        if await asyncio.to_thread(is_gone, replica_id):
            logger.info("replica %s has ended, and is waited for no longer", replica_id)
            await names.forget(replica_id)
