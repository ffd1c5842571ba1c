from __future__ import annotations

from random import Random

from msgspec.structs import fields

from lora_serve.fuzz.sampling import ParamsWriter
from lora_serve.fuzz.trace import Tokens
from lora_serve.sampling_params import SamplingParams

# Not drawn by it, and why not.
DRAWN_ELSEWHERE = {"thinking_token_budget"}  # by talks, whose prompts mark reasoning
OF_THE_ENGINE = {"reasoning"}  # made of the tokenizer's markers; no request names it
OF_THE_TEXT = {"include_stop_str_in_output", "skip_special_tokens"}  # cold answers are tokens


def test_requests_ask_for_every_sampling_parameter_that_changes_tokens() -> None:
    plain, prompt, varied = SamplingParams(), Tokens((5, 6, 7)), set[str]()
    names = {field.name for field in fields(SamplingParams)}
    for seed in range(10):
        writer = ParamsWriter(Random(seed), 100, seed)
        drawn = [writer.draw(prompt) for _ in range(30)]
        varied |= {n for n in names if any(getattr(p, n) != getattr(plain, n) for p in drawn)}
    assert varied == names - DRAWN_ELSEWHERE - OF_THE_ENGINE - OF_THE_TEXT
