"""The one table of the kinds of tiers. What a kind needs is imported when it is opened."""

from __future__ import annotations

from lora_serve.kv_tiers import ram
from lora_serve.kv_tiers.disk import kind as disk
from lora_serve.kv_tiers.inspection import Inspection
from lora_serve.kv_tiers.kind import InspectedPlace
from lora_serve.kv_tiers.redis import kind as redis

# The fastest first: the order in which they are asked.
TIER_KINDS = (ram.KIND, disk.KIND, redis.KIND)
PLACES = " or ".join(kind.places for kind in TIER_KINDS if kind.places)


def inspect(place: InspectedPlace) -> Inspection | None:
    """What lies there, whichever kind of tier keeps it; None if none does, see PLACES.

    Raises:
        ConfigError: the client library of its kind is missing.
    """
    inspections = (kind.inspect(place) for kind in TIER_KINDS)
    return next((found for found in inspections if found is not None), None)
