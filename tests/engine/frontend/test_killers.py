"""A request that kills real engine processes, beside others that do not."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from lora_serve.engine.frontend.async_engine import AsyncEngine
from lora_serve.engine.frontend.client import EngineClient
from lora_serve.engine.frontend.quarantine import Quarantine
from lora_serve.engine.settings import engine_config
from lora_serve.errors import RequestFailedError
from lora_serve.generate_request import GenerateRequest
from lora_serve.messages import EngineMessage, EngineReply, EngineRequest, StepOutputs
from lora_serve.observability.metrics import EngineMetrics
from lora_serve.outputs import RequestOutput
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams
from lora_serve.text.tokenizer import Tokenizer

MARK = 77
NUM_TOKENS = 40
KILLS_AT = 10  # tokens of the marked prompt's answer


class MortalClient(EngineClient):
    """Its process is killed when a prompt that begins with MARK has got KILLS_AT tokens.

    The signal comes from outside, later than the death of an engine that fails of itself would; so
    what the process still says meanwhile is not heard.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_left = KILLS_AT
        self._is_killed = False
        self._marked: str | None = None
        self.requests: list[str] = []

    async def send(self, message: EngineMessage) -> None:
        await super().send(message)
        if isinstance(message, EngineRequest):
            (choice_id,) = message.choice_ids
            self.requests.append(choice_id)
            if message.request.prompt.token_ids[0] == MARK:
                self._marked = choice_id

    async def receive(self) -> EngineReply:
        reply = await super().receive()
        while self._is_killed:  # ends by EngineDeadError
            await super().receive()
        if isinstance(reply, StepOutputs):
            mine = [output for output in reply.outputs if output.request_id == self._marked]
            self._num_left -= sum(len(output.new_token_ids) for output in mine)
            if self._num_left <= 0 and self.pid is not None:
                os.kill(self.pid, signal.SIGKILL)
                self._is_killed = True
        return reply


async def answer(engine: AsyncEngine, name: str, first_token: int) -> RequestOutput:
    prompt = TokensPrompt((first_token, *range(20)))
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, seed=0)
    output = RequestOutput(name, list(prompt.token_ids), 1)
    request = GenerateRequest(request_id=name, prompt=prompt, params=params, is_streamed=False)
    async for delta in engine.generate(request):
        output.add(delta)
    return output


async def test_innocents_beside_a_killer_get_the_answers_they_get_alone(
    model_path: Path,
) -> None:
    config = engine_config(model=str(model_path), num_gpu_blocks_override=200)
    clients: list[MortalClient] = []

    def make_client() -> MortalClient:
        clients.append(MortalClient())
        return clients[-1]

    client = make_client()
    ready = await client.start(config)
    tokenizer = Tokenizer(str(model_path), None)
    patient = Quarantine(lambda: 0.0)  # however slow this machine is
    metrics = EngineMetrics("m")
    engine = AsyncEngine(config, client, ready, tokenizer, metrics, make_client, patient)
    try:
        alone = [await answer(engine, f"alone{i}", i) for i in range(3)]
        names = [("before", 0), ("between", 1), ("killer", MARK), ("after", 2)]
        tasks = [asyncio.create_task(answer(engine, *name)) for name in names]
        with pytest.raises(RequestFailedError, match="died 2 times"):
            await asyncio.wait_for(tasks[2], 120)
        outputs = await asyncio.wait_for(asyncio.gather(*tasks[:2], tasks[3]), 120)
    finally:
        await engine.shutdown()
    for output, expected in zip(outputs, alone, strict=True):
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert len(clients) == 3, "two deaths and no more"
