"""What callers see when the task that reads the engine's replies fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from lora_serve.config import EngineConfig
from lora_serve.engine.async_engine import AsyncEngine
from lora_serve.errors import EngineDeadError
from lora_serve.messages import (
    CallReply,
    EngineMessage,
    EngineOutput,
    EngineReady,
    EngineReply,
    StepOutputs,
)
from lora_serve.observability.metrics import EngineMetrics
from lora_serve.outputs import OutputDelta
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams
from tests.fakes.tokenizer import VOCAB_SIZE, ByteTokenizer


class OneTokenClient:
    """Answers every request with one token, for ever."""

    def __init__(self) -> None:
        self.is_alive = True
        self.sent: list[EngineMessage] = []
        self._replies: asyncio.Queue[EngineReply] = asyncio.Queue()

    async def send(self, message: EngineMessage) -> None:
        self.sent.append(message)
        request_id = getattr(message, "request_id", None)
        if request_id is not None:
            self._replies.put_nowait(StepOutputs((EngineOutput(request_id, (65,)),)))

    def reply(self, reply: EngineReply) -> None:
        self._replies.put_nowait(reply)

    async def receive(self) -> EngineReply:
        return await self._replies.get()

    async def close(self) -> None:
        self.is_alive = False


class BrokenTokenizer(ByteTokenizer):
    """Cannot decode answers."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if 65 in token_ids:
            raise ValueError("no such token")
        return super().decode(token_ids, skip_special_tokens)


async def generate(engine: AsyncEngine, request_id: str) -> list[OutputDelta]:
    stream = engine.generate(TokensPrompt((1, 2)), SamplingParams(), request_id=request_id)
    return [delta async for delta in stream]


async def test_a_bug_in_reading_replies_fails_everybody_instead_of_hanging() -> None:
    ready = EngineReady(vocab_size=VOCAB_SIZE, max_model_len=64, num_blocks=64)
    client = OneTokenClient()
    engine = AsyncEngine(EngineConfig(), client, ready, BrokenTokenizer(), EngineMetrics("m"))
    async with asyncio.timeout(5):
        with pytest.raises(EngineDeadError):
            await generate(engine, "running")
        assert not engine.is_alive
        with pytest.raises(EngineDeadError, match="restart"):
            await generate(engine, "later")
        with pytest.raises(EngineDeadError):
            await engine.list_adapters()
        await engine.shutdown()


async def test_a_reply_to_a_caller_who_has_just_given_up_harms_nobody() -> None:
    ready = EngineReady(vocab_size=VOCAB_SIZE, max_model_len=64, num_blocks=64)
    client = OneTokenClient()
    engine = AsyncEngine(EngineConfig(), client, ready, ByteTokenizer(), EngineMetrics("m"))
    call = asyncio.create_task(engine.list_adapters())
    while not client.sent:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    client.reply(CallReply(client.sent[0].call_id))  # the reader is woken first,
    call.cancel()  # and sees the caller's future cancelled, but not yet gone
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.sleep(0)
    assert engine.is_alive
    await engine.shutdown()
