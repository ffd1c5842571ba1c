"""What a change makes of a name's record. Pure: the store alone orders changes.

A name keeps its generation when it is unloaded: KV of before a reset is never trusted again.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from lora_serve.catalog.records import Record
from lora_serve.errors import AdapterExistsError, AdapterNotFoundError

# What becomes of the record that a name has now. Raises what the caller is to be told.
Plan = Callable[[Record | None], Record]


def loading(wish: Record, *, load_inplace: bool) -> Plan:
    """Let the name stand for what `wish` says; raises AdapterExistsError if it may not be taken."""

    def plan(current: Record | None) -> Record:
        is_taken = current is not None and not current.is_unloaded
        if is_taken and not load_inplace:
            raise AdapterExistsError(
                f"The lora adapter '{wish.name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True."
            )
        return replace(wish, generation=0 if current is None else current.generation)

    return plan


def unloading(wish: Record) -> Plan:
    """Let the name stand for nothing. Raises AdapterNotFoundError if it does so already."""

    def plan(current: Record | None) -> Record:
        known = _required(current, wish.name)
        return replace(wish, generation=known.generation)

    return plan


def resetting(wish: Record) -> Plan:
    """Raise the generation, of the same bytes. Raises AdapterNotFoundError without any."""

    def plan(current: Record | None) -> Record:
        known = _required(current, wish.name)
        return replace(
            known,
            generation=known.generation + 1,
            by=wish.by,
            replica=wish.replica,
            time=wish.time,
        )

    return plan


def _required(current: Record | None, name: str) -> Record:
    if current is None or current.is_unloaded:
        raise AdapterNotFoundError(
            f"The lora adapter '{name}' cannot be found. /v1/models lists those that are loaded.",
            "lora_name",
        )
    return current
