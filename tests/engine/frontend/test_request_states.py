"""What waits for a caller."""

from __future__ import annotations

import pytest

from lora_serve.engine.frontend.request_states import MAX_WAITING_LOGPROBS, RequestState
from lora_serve.errors import SlowReaderError
from lora_serve.generate_request import GenerateRequest
from lora_serve.identity import BASE_MODEL, NoAdapter
from lora_serve.messages import EngineRequest
from lora_serve.outputs import OutputDelta
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams
from lora_serve.step import TokenLogprobs

WIDE = OutputDelta(
    0, logprobs=(TokenLogprobs(1, -1.0, 1, ((2, -2.0),) * (MAX_WAITING_LOGPROBS // 2)),)
)


async def test_alternatives_that_wait_to_be_read_are_bounded() -> None:
    request = GenerateRequest(
        request_id="r", prompt=TokensPrompt((1,)), params=SamplingParams(), is_streamed=True
    )
    state = RequestState(EngineRequest(request), max_backlog=1000)
    for _ in range(4):
        assert state.put(WIDE)
        await state.get()
    assert state.put(WIDE)
    assert state.put(WIDE)
    assert not state.put(WIDE)
    for _ in range(2):
        assert await state.get() is WIDE
    with pytest.raises(SlowReaderError, match="log-probabilities of the answer wait"):
        await state.get()


@pytest.mark.parametrize(
    ("lora_name", "version"), [(BASE_MODEL, BASE_MODEL), ("tenant-a", None)], ids=["base", "named"]
)
async def test_an_aborted_request_that_no_engine_had_names_no_version_of_its_adapter(
    lora_name: str | NoAdapter, version: NoAdapter | None
) -> None:
    request = GenerateRequest(
        request_id="r", prompt=TokensPrompt((1,)), params=SamplingParams(n=2), lora_name=lora_name
    )
    state = RequestState(EngineRequest(request), max_backlog=1000)
    state.end_unsent()
    assert [await state.get(), await state.get()] == [
        OutputDelta(index, finish_reason="abort", adapter=version) for index in range(2)
    ]
