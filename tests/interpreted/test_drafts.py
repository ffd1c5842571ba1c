"""Drafts on interpreted Triton kernels, in recorded steps: answers are those without drafts."""

from __future__ import annotations

import random
from pathlib import Path

from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams
from lora_serve.scheduler.request import Request
from tests.fakes.drafting import drafting, some_drafts
from tests.interpreted.test_engine import make_llm
from tests.test_llm import bits

PROMPTS = [TokensPrompt((*range(20), token_id)) for token_id in (30, 31)]
PARAMS = [
    SamplingParams(max_tokens=6, temperature=0, logprobs=2, ignore_eos=True, seed=0),
    SamplingParams(max_tokens=6, temperature=1.0, presence_penalty=-2.0, ignore_eos=True, seed=1),
]
NAMES = ["a", None]


def test_drafts_change_no_bit(model_path: Path, adapter_paths: list[Path]) -> None:
    settings = {"max_num_seqs": 2}
    with make_llm(model_path, adapter_paths, enforce_eager=True, **settings) as llm:
        expected = llm.generate(PROMPTS, PARAMS, lora_name=NAMES)
    answers = [output.outputs[0].token_ids for output in expected]
    rng = random.Random(8)

    def drafts(request: Request) -> list[int]:
        return some_drafts(answers[request.seed][request.num_output_tokens :], 90, rng)

    with drafting(drafts) as counts, make_llm(model_path, adapter_paths, **settings) as llm:
        found = llm.generate(PROMPTS, PARAMS, lora_name=NAMES)
    assert list(map(bits, found)) == list(map(bits, expected))
    assert counts.num_accepted > 2
    assert counts.num_rejected > 2
