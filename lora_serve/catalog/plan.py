"""What a change makes of a name's record. Pure: the store alone orders changes.

A name keeps its generation when it is unloaded: KV of before a reset is never trusted again. And
it stays unloaded for --lora-modules, until somebody loads it.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from lora_serve.catalog.records import MAX_NUMBER, Record
from lora_serve.errors import (
    AdapterExistsError,
    AdapterNotFoundError,
    CatalogUnavailableError,
    LoraServeError,
)

# What becomes of the record that a name has now. Raises what the caller is to be told.
Plan = Callable[[Record | None], Record]


class OtherStateError(LoraServeError):
    """The name's record is not as a plan for --lora-modules takes it to be."""

    def __init__(self, name: str, found: Record | None) -> None:
        super().__init__(f"the catalog has another record of '{name}': {found}")
        self.found = found


def loading(wish: Record, *, load_inplace: bool) -> Plan:
    """Let the name stand for what `wish` says; raises AdapterExistsError if it may not be taken."""

    def plan(current: Record | None) -> Record:
        is_taken = current is not None and not current.is_unloaded
        if is_taken and not load_inplace:
            raise AdapterExistsError(
                f"The lora adapter '{wish.name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True."
            )
        return _following(wish, current)

    return plan


def loading_module(wish: Record) -> Plan:
    """Let a name of --lora-modules stand for what `wish` says.

    Raises OtherStateError if it stands for something, or did so until somebody unloaded it.
    """

    def plan(current: Record | None) -> Record:
        if current is not None and not is_open_to_modules(current):
            raise OtherStateError(wish.name, current)
        return replace(_following(wish, current), is_module=True)

    return plan


def naming_module(name: str) -> Plan:
    """Note that --lora-modules names what is loaded, so that its unload will be remembered.

    Raises OtherStateError if nothing is.
    """

    def plan(current: Record | None) -> Record:
        if current is None or current.is_unloaded:
            raise OtherStateError(name, current)
        return replace(current, is_module=True)

    return plan


def is_open_to_modules(current: Record) -> bool:
    """Whether a server's --lora-modules decides what the name stands for."""
    return current.is_unloaded and not current.is_module


def unloading(wish: Record) -> Plan:
    """Let the name stand for nothing. Raises AdapterNotFoundError if it does so already."""

    def plan(current: Record | None) -> Record:
        return _following(wish, _required(current, wish.name))

    return plan


def resetting(wish: Record) -> Plan:
    """Raise the generation, of the same bytes.

    Raises AdapterNotFoundError without any, CatalogUnavailableError if it is the last there is.
    """

    def plan(current: Record | None) -> Record:
        known = _required(current, wish.name)
        if known.generation + 1 >= MAX_NUMBER:  # which no number of resets comes to
            raise CatalogUnavailableError(
                f"the catalog's generation of '{wish.name}' is {known.generation}, the last there "
                "is; another program has written it: stop the catalog's servers, delete its file "
                "or keys, and start them again; nothing was changed"
            )
        return replace(
            known,
            generation=known.generation + 1,
            by=wish.by,
            replica=wish.replica,
            time=wish.time,
        )

    return plan


def _following(wish: Record, current: Record | None) -> Record:
    if current is None:
        return wish
    return replace(wish, generation=current.generation, is_module=current.is_module)


def _required(current: Record | None, name: str) -> Record:
    if current is None or current.is_unloaded:
        raise AdapterNotFoundError(
            f"The lora adapter '{name}' cannot be found. /v1/models lists those that are loaded.",
            "lora_name",
        )
    return current
