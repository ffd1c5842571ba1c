"""An engine process without a process: answers and dies as a test says."""

from __future__ import annotations

import asyncio

import msgspec

from lora_serve.config import EngineConfig
from lora_serve.errors import EngineDeadError
from lora_serve.identity import EVERYTHING
from lora_serve.messages import (
    AdapterInfo,
    CallReply,
    EndRequests,
    EngineMessage,
    EngineOutput,
    EngineReady,
    EngineReply,
    EngineRequest,
    GetRequests,
    GetStats,
    LoadAdapter,
    Pause,
    ResetPrefixCache,
    Resume,
    StepOutputs,
    UnloadAdapter,
)
from tests.fakes.tokenizer import VOCAB_SIZE

READY = EngineReady(
    fingerprint=b"f", vocab_size=VOCAB_SIZE, max_model_len=64, num_blocks=64, max_request_tokens=64
)


class FakeClient:
    """num_tokens: given to each request at once; the last of its max_tokens finishes it.

    All of a request's tokens are the one that follows its prompt's last.

    deadly: a prompt that begins with this token kills the engine that gets it.
    hangs: take messages and reply to none; `kill` ends it.
    holds_resets: leave calls to reset unanswered; `resets` has the answers.
    """

    def __init__(
        self,
        num_tokens: int = 0,
        *,
        ready: EngineReady = READY,
        start_error: Exception | None = None,
        deadly: int | None = None,
    ) -> None:
        self.num_tokens = num_tokens
        self.sent: list[EngineMessage] = []
        self.config: EngineConfig | None = None
        self.is_alive = True
        self.was_closed = False
        self.hangs = False
        self.holds_resets = False
        self.resets: list[CallReply] = []
        self._adapters: dict[str, AdapterInfo] = {}
        self._ready = ready
        self._start_error = start_error
        self._deadly = deadly
        self._replies: asyncio.Queue[EngineReply | Exception] = asyncio.Queue()

    @property
    def pid(self) -> int | None:
        return 4711

    @property
    def requests(self) -> list[EngineRequest]:
        return [message for message in self.sent if isinstance(message, EngineRequest)]

    @property
    def request_ids(self) -> list[str]:
        return [message.request.request_id for message in self.requests]

    async def start(self, config: EngineConfig) -> EngineReady:
        self.config = config
        if self._start_error is not None:
            raise self._start_error
        return self._ready

    async def send(self, message: EngineMessage) -> None:
        assert self.is_alive, "asked after its death"
        self.sent.append(message)
        if self.hangs:
            return
        match message:
            case EngineRequest():
                if message.request.prompt.token_ids[0] == self._deadly:
                    self.die()
                    return
                self.give_tokens(message, self.num_tokens)
            case LoadAdapter():
                adapter = AdapterInfo(
                    message.lora_name, message.lora_path, "ab" * 32, 0, 8, 100, "resident",
                    message.pinned, 0, 1.0,
                )  # fmt: skip
                self._adapters[adapter.name] = adapter
                self.reply(CallReply(message.call_id, adapters=(adapter,)))
            case ResetPrefixCache():
                self.resets.append(self._reset(message))
                if not self.holds_resets:
                    self.reply(self.resets[-1])
            case EndRequests():
                ended = tuple(EngineOutput(i, finish_reason="abort") for i in message.request_ids)
                self.reply(StepOutputs(ended))
                self.reply(CallReply(message.call_id))
            case UnloadAdapter() | GetStats() | GetRequests() | Pause() | Resume():
                self.reply(CallReply(message.call_id))

    def _reset(self, call: ResetPrefixCache) -> CallReply:
        if call.lora_name is EVERYTHING:
            return CallReply(call.call_id)
        adapter = self._adapters[call.lora_name]
        adapter = msgspec.structs.replace(adapter, generation=adapter.generation + 1)
        self._adapters[call.lora_name] = adapter
        return CallReply(call.call_id, adapters=(adapter,))

    def give_tokens(self, message: EngineRequest, count: int, start: int = 0) -> None:
        """Let each choice, one after the other, grow by `count` tokens; `start` it has already."""
        limit = message.request.params.max_tokens
        token_id = message.request.prompt.token_ids[-1] + 1
        for choice_id in message.choice_ids:
            for length in range(start + 1, start + count + 1):
                reason = "length" if length == limit else None
                output = EngineOutput(choice_id, (token_id,), finish_reason=reason)
                self.reply(StepOutputs((output,)))
                if reason:
                    break

    def reply(self, reply: EngineReply | Exception) -> None:
        self._replies.put_nowait(reply)

    def die(self) -> None:
        self.is_alive = False
        self.reply(EngineDeadError("the engine process was ended by signal 9 (Killed)"))

    async def receive(self) -> EngineReply:
        reply = await self._replies.get()
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def kill(self) -> None:
        if self.is_alive:
            self.die()

    async def close(self) -> None:
        self.is_alive = False
        self.was_closed = True
