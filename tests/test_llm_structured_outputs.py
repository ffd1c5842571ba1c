"""Answers that must match, on a real model: they do, and each is that of a cold, lone engine."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lora_serve.errors import InvalidRequestError
from lora_serve.llm import LLM
from lora_serve.outputs import RequestOutput
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams
from lora_serve.structured_outputs import StructuredOutput
from tests.test_llm import bits, load_adapters

NUM_CASES = 14
NAMES = (None, "a", "b", "c")
ITEM = {
    "type": "object",
    "properties": {"b": {"type": "boolean"}, "a": {"enum": [1, "x"]}},
    "required": ["b", "a"],
    "additionalProperties": False,
}
PATTERN = "[a-f]{2,20}(xy|z)"
CHOICES = ("yes", "no", "perhaps")
TAG = {
    "structures": [{"begin": "<t>", "schema": {"type": "boolean"}, "end": "</t>"}],
    "triggers": ["<t"],
}
CONSTRAINTS = (
    None,
    StructuredOutput.of(json=ITEM),
    StructuredOutput.of(regex=PATTERN),
    StructuredOutput.of(choice=CHOICES),
    StructuredOutput.of(grammar='root ::= "(" root ")" | "x"'),
    StructuredOutput.of(json_object=True),
    StructuredOutput.of(structural_tag=TAG),
)
SETTINGS: dict[str, Any] = {"dtype": "float32", "cpu_threads": 1, "enable_lora": True}


@pytest.fixture(scope="module")
def lone(model_path: Path, adapter_paths: list[Path]) -> Iterator[LLM]:
    with LLM(str(model_path), enable_prefix_caching=False, max_num_seqs=1, **SETTINGS) as llm:
        load_adapters(llm, adapter_paths)
        yield llm


def cases(count: int) -> Iterator[tuple[TokensPrompt, SamplingParams, str | None]]:
    rng = random.Random(7)
    prefix = rng.choices(range(90), k=60)
    for number in range(count):
        prompt = TokensPrompt((*prefix[: rng.choice((0, 40, 60))], *rng.choices(range(90), k=7)))
        params = SamplingParams(
            n=rng.choice((1, 1, 2)),
            max_tokens=rng.choice((5, 24)),
            min_tokens=rng.choice((0, 0, 4)),
            temperature=rng.choice((0.0, 1.0)),
            seed=number,
            stop=rng.choice(((), ("xy",))),
            stop_token_ids=rng.choice(((), (70,))),
            ignore_eos=rng.random() < 0.3,
            logprobs=rng.choice((None, 2)),
            prompt_logprobs=rng.choice((None, None, 1)),
            repetition_penalty=rng.choice((1.0, 1.3)),
            presence_penalty=rng.choice((0.0, 0.5)),
            logit_bias=rng.choice(({}, {75: 4.0})),
            structured_outputs=CONSTRAINTS[number % len(CONSTRAINTS)],
        )
        yield prompt, params, NAMES[number % len(NAMES)]


@pytest.fixture(scope="module")
def right(lone: LLM) -> list[list[object]]:
    """What each case is answered by the lone engine."""
    return [
        bits(lone.generate(prompt, params, lora_name=name)[0])
        for prompt, params, name in cases(NUM_CASES)
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"num_gpu_blocks_override": 10, "max_num_batched_tokens": 64},
        {"num_gpu_blocks_override": 10, "max_num_batched_tokens": 23, "async_scheduling": True},
    ],
    ids=["preempting", "preempting, overlapped"],
)
def test_batch_chunks_cache_and_preemption_change_no_bit_of_an_answer_that_must_match(
    settings: dict[str, Any],
    right: list[list[object]],
    model_path: Path,
    adapter_paths: list[Path],
) -> None:
    prompts, params, names = zip(*cases(NUM_CASES), strict=True)
    with LLM(str(model_path), **SETTINGS, **settings) as llm:
        load_adapters(llm, adapter_paths)
        outputs = llm.generate(prompts, params, lora_name=names)
        assert llm.stats().num_preemptions > 0
    assert [bits(output) for output in outputs] == right


def answers(llm: LLM, constraint: StructuredOutput, **settings: Any) -> RequestOutput:
    params = SamplingParams(
        structured_outputs=constraint, **{"n": 4, "max_tokens": 200, "seed": 3, **settings}
    )
    (output,) = llm.generate("Hello", params)
    return output


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_answers_match(lone: LLM, ignore_eos: bool) -> None:
    for choice in answers(lone, CONSTRAINTS[1], ignore_eos=ignore_eos).outputs:
        assert choice.finish_reason == "stop"
        assert list(json.loads(choice.text)) == ["b", "a"]
    for choice in answers(lone, CONSTRAINTS[2], ignore_eos=ignore_eos).outputs:
        assert re.fullmatch(PATTERN, choice.text)
    for choice in answers(lone, CONSTRAINTS[3], ignore_eos=ignore_eos).outputs:
        assert choice.text in CHOICES


def test_logprobs_are_those_of_the_unmasked_logits(lone: LLM) -> None:
    held = answers(lone, CONSTRAINTS[2], n=1, logprobs=5).outputs[0]
    free = lone.generate("Hello", SamplingParams(max_tokens=1, seed=3, logprobs=5))[0].outputs[0]
    assert held.logprobs[0].top == free.logprobs[0].top


def test_min_tokens_ban_end_tokens_and_the_answer_ends_where_nothing_else_may_follow(
    lone: LLM,
) -> None:
    constraint = StructuredOutput.of(regex="a{1,6}")
    for minimum in (4, 20):
        for choice in answers(lone, constraint, min_tokens=minimum).outputs:
            assert min(minimum, 6) <= len(choice.text) <= 6
            assert choice.finish_reason == "stop"


def test_a_stop_string_ends_an_answer_in_the_middle_of_its_grammar(lone: LLM) -> None:
    choice = answers(lone, StructuredOutput.of(regex="a{3}b{30}"), n=1, stop=("bb",)).outputs[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == ("aaa", "stop", "bb")


def test_a_refused_constraint_leaves_the_engine_as_it_was(lone: LLM) -> None:
    for constraint in (StructuredOutput("regex", "("), StructuredOutput("json", "false")):
        with pytest.raises(InvalidRequestError, match="structured_outputs") as refusal:
            answers(lone, constraint)
        assert refusal.value.param == "structured_outputs"
    assert answers(lone, CONSTRAINTS[3]).outputs[0].text in CHOICES
