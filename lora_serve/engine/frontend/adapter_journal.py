"""What the API process remembers of adapters, so that a new engine process has the same ones.

It is written from the engine's own replies, so it says what the engine did and not what it was
asked to do; a caller who has given up changes nothing about that.
"""

from __future__ import annotations

import msgspec

from lora_serve.errors import NotForgottenError
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
        message = self._asked.pop(reply.call_id, None)
        # a reset that some tier has not confirmed has raised the generation all the same
        if reply.error is not None and reply.error.kind != NotForgottenError.__name__:
            return
        match message:
            case LoadAdapter():
                (info,) = reply.adapters
                self._adapters[info.name] = info
            case UnloadAdapter():
                self._adapters.pop(message.lora_name, None)
            case ResetPrefixCache() if message.lora_name is not None:
                self._raise_generation(message.lora_name)

    def note_death(self) -> None:
        """What was asked of the engine that died will not be answered."""
        self._asked.clear()

    def restore_message(self) -> RestoreAdapters:
        return RestoreAdapters(tuple(self._adapters.values()), dict(self._generations))

    def _raise_generation(self, name: str) -> None:
        info = self._adapters[name]
        self._generations[name] = info.generation + 1
        self._adapters[name] = msgspec.structs.replace(info, generation=info.generation + 1)
