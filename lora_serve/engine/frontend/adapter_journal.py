"""What the API process remembers of adapters, so that a new engine process has the same ones.

It is written from the engine's replies alone, so it says what the engine did and not what it was
asked to do; a caller who has given up changes nothing about that. Replies come in the order in
which the engine did things, but for resets, which are answered when the KV tiers have forgotten:
so a reset says which generation it raised, and generations only ever grow.
"""

from __future__ import annotations

import msgspec

from lora_serve.messages import (
    AdapterInfo,
    CallReply,
    EngineMessage,
    LoadAdapter,
    ResetPrefixCache,
    RestoreAdapters,
    UnloadAdapter,
)


class AdapterJournal:
    """Names with the version each stands for, and the generations that names have reached."""

    def __init__(self) -> None:
        self._adapters: dict[str, AdapterInfo] = {}
        self._generations: dict[str, int] = {}
        self._asked: dict[int, EngineMessage] = {}  # by call_id

    def note_call(self, call_id: int, message: EngineMessage) -> None:
        """This is about to be sent."""
        self._asked[call_id] = message

    def note_reply(self, reply: CallReply) -> None:
        """The engine has answered a call; an error that changed nothing names no adapter."""
        match self._asked.pop(reply.call_id, None):
            case LoadAdapter(is_examined=False):
                self._adapters |= {info.name: info for info in reply.adapters}
            case UnloadAdapter() as call if reply.error is None:
                self._adapters.pop(call.lora_name, None)
            case ResetPrefixCache():
                for info in reply.adapters:
                    self._raise_generation(info.name, info.generation)

    def get(self, name: str) -> AdapterInfo | None:
        """What the name stands for, as it was when it was loaded."""
        return self._adapters.get(name)

    def note_death(self) -> None:
        """What was asked of the engine that died will not be answered."""
        self._asked.clear()

    def restore_message(self) -> RestoreAdapters:
        return RestoreAdapters(tuple(self._adapters.values()), dict(self._generations))

    def _raise_generation(self, name: str, generation: int) -> None:
        """The name may have been unloaded since, or stand for another version."""
        self._generations[name] = max(generation, self._generations.get(name, 0))
        info = self._adapters.get(name)
        if info is not None and info.generation < generation:
            self._adapters[name] = msgspec.structs.replace(info, generation=generation)
