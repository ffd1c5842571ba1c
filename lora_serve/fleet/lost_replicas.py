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
QUIET_SECONDS = 4.0  # twice the time between two words of a replica that runs (RENEW_SECONDS)

HasEnded = Callable[[str, float], bool]  # a replica as the catalog calls it, and its silence


@asynccontextmanager
async def lost_ones_forgotten(
    names: AdapterNames, has_ended: HasEnded, look_seconds: float = LOOK_SECONDS
) -> AsyncIterator[None]:
    """Have replicas forgotten once they are gone, as long as this lasts.

    Args:
        has_ended: may block.
    """
    if not names.is_shared:
        yield
        return
    task = asyncio.create_task(_keep_looking(names, has_ended, look_seconds), name="lost-replicas")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


def run_of(place: str) -> str:
    """A name for this start of a fleet at a place, where no two run at once."""
    return f"{place}@{uuid.uuid4().hex[:12]}"


def is_gone(
    run: str, is_running: Callable[[str], bool], replica: str, silent_seconds: float
) -> bool:
    """Whether a replica, as the catalog calls it, was this fleet's and has ended.

    Those of earlier starts at the same place have once they are silent: they ended with the server
    before them.

    Args:
        run: from `run_of`, or what else names the fleet that this process is of.
        is_running: whether there is an actor of this name in it; may block.
    """
    other, _, actor = replica.rpartition("/")
    if other == run:
        return not is_running(actor)
    place, is_started_here, _ = run.rpartition("@")
    is_earlier = bool(is_started_here) and other.rpartition("@")[0] == place
    return is_earlier and silent_seconds > LEASE_SECONDS


async def _keep_looking(names: AdapterNames, has_ended: HasEnded, look_seconds: float) -> None:
    while True:
        await asyncio.sleep(look_seconds)
        try:
            await _look(names, has_ended)
        except LoraServeError:  # no store now, or another one was first
            pass
        except Exception:  # of who is asked, which may have lost what it knew by
            logger.exception("what has become of silent replicas is not known")


async def _look(names: AdapterNames, has_ended: HasEnded) -> None:
    for standing in await names.standings():
        replica_id = standing.member.replica_id
        silent_seconds = standing.silent_seconds
        if silent_seconds <= QUIET_SECONDS or replica_id == names.replica_id:
            continue
        if await asyncio.to_thread(has_ended, replica_id, silent_seconds):
            logger.info("replica %s has ended, and is waited for no longer", replica_id)
            await names.forget(replica_id, has_ended=True)
