from __future__ import annotations

from lora_serve.engine.wire import encoder
from lora_serve.generate_request import GenerateRequest
from lora_serve.messages import EngineRequest
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import MAX_N, SamplingParams


def num_bytes(n: int) -> int:
    params = SamplingParams(n=n, seed=0, stop=("x" * 1024,) * 16)
    request = GenerateRequest(
        request_id="r", prompt=TokensPrompt(tuple(range(100_000))), params=params
    )
    return len(encoder().encode(EngineRequest(request)))


def test_the_choices_of_a_request_share_its_prompt_and_its_stop_strings_in_one_message() -> None:
    assert num_bytes(MAX_N) - num_bytes(1) < 10
