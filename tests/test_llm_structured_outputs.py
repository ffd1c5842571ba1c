"""Answers that must match, on a real model: they do, and each is that of a cold, lone engine."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lora_serve.errors import InvalidRequestError
from lora_serve.llm import LLM
from lora_serve.ops._cpu import usable_paths
from lora_serve.ops.cpu.backend import SCREENING_PATHS
from lora_serve.outputs import RequestOutput
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling.lm_head_screening import LMHeadScreening
from lora_serve.sampling_params import SamplingParams
from lora_serve.structured_outputs import StructuredOutput
from tests.structured_output.conftest import require_xgrammar
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
    settings = {"enable_prefix_caching": False, "max_num_seqs": 1, "speculation": "off"}
    with LLM(str(model_path), **settings, **SETTINGS) as llm:
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
        pytest.param(
            {"num_gpu_blocks_override": 10, "max_num_batched_tokens": 64}, marks=pytest.mark.slow
        ),
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
        assert llm.stats().num_accepted_tokens > 0  # forced tokens, all of which are drawn
    assert [bits(output) for output in outputs] == right


def test_guesses_that_a_grammar_permits_save_steps_and_change_no_bit(
    right: list[list[object]], model_path: Path, adapter_paths: list[Path]
) -> None:
    """Asked again, each answer is guessed from what was answered before."""
    prompts, params, names = zip(*cases(NUM_CASES), strict=True)
    guessing = {"method": "suffix", "max_step_rows": 64, "measure_row_costs": False}
    with LLM(str(model_path), **SETTINGS, speculative_config=guessing) as llm:
        load_adapters(llm, adapter_paths)
        steps, accepted = [0], [0]
        for _ in range(2):
            outputs = llm.generate(prompts, params, lora_name=names)
            assert [bits(output) for output in outputs] == right
            steps.append(llm.stats().num_steps)
            accepted.append(llm.stats().num_accepted_tokens)
    assert accepted[2] - accepted[1] > accepted[1] + 50
    assert steps[2] - steps[1] < steps[1]


def test_answers_that_xgrammar_holds_parse_and_are_those_of_a_cold_lone_engine(
    model_path: Path, adapter_paths: list[Path]
) -> None:
    require_xgrammar()
    settings = SETTINGS | {"structured_outputs_backend": "xgrammar"}
    prompts, params, names = zip(*cases(NUM_CASES), strict=True)
    alone = {"enable_prefix_caching": False, "max_num_seqs": 1}
    with LLM(str(model_path), **settings, **alone) as llm:
        load_adapters(llm, adapter_paths)
        right = [
            bits(llm.generate(prompt, one, lora_name=name)[0])
            for prompt, one, name in cases(NUM_CASES)
        ]
    crowded = {"num_gpu_blocks_override": 10, "max_num_batched_tokens": 23}
    with LLM(str(model_path), **settings, **crowded, async_scheduling=True) as llm:
        load_adapters(llm, adapter_paths)
        outputs = llm.generate(prompts, params, lora_name=names)
        assert llm.stats().num_preemptions > 0
        assert [bits(output) for output in outputs] == right
        for choice in answers(llm, CONSTRAINTS[1], max_tokens=120).outputs:
            assert list(json.loads(choice.text)) == ["b", "a"]
        for choice in answers(llm, CONSTRAINTS[2], max_tokens=120).outputs:
            assert re.fullmatch(PATTERN, choice.text)
        with pytest.raises(InvalidRequestError, match=r"not in Lark's.*backend llguidance"):
            answers(llm, StructuredOutput.of(grammar='start: "a"'), max_tokens=9)


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


def test_a_chats_grammar_waits_until_the_reasoning_that_its_template_knows_has_ended(
    lone: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, end = 80, 81
    markers, encode = {"<think>": [start], "</think>": [end]}, lone._encode
    monkeypatch.setattr(lone, "_encode", lambda text: markers.get(text) or encode(text))
    params = SamplingParams(
        max_tokens=20, temperature=0, logit_bias={end: 100.0}, structured_outputs=CONSTRAINTS[3]
    )
    conversation = [{"role": "user", "content": "Hello"}]
    template = "{{ messages[0].content }}{# </think> #}"
    for chat_template, num_reasoned in ((template + "<think>", 1), (template, 0), ("Hello", 0)):
        (answer,) = lone.chat(conversation, params, chat_template=chat_template)
        token_ids = answer.outputs[0].token_ids
        assert list(token_ids[:num_reasoned]) == [end] * num_reasoned
        assert lone.tokenizer.decode(token_ids[num_reasoned:]) in CHOICES


def test_a_chats_reasoning_ends_when_its_budget_is_spent(
    lone: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, end = 80, 81
    markers, encode = {"<think>": [start], "</think>": [end]}, lone._encode
    monkeypatch.setattr(lone, "_encode", lambda text: markers.get(text) or encode(text))
    params = SamplingParams(
        max_tokens=20, temperature=0, logit_bias={end: -100.0}, thinking_token_budget=3
    )
    held = msgspec.structs.replace(params, structured_outputs=CONSTRAINTS[3])
    conversation = [{"role": "user", "content": "Hello"}]
    template = "{{ messages[0].content }}{# </think> #}<think>"
    answers = lone.chat([conversation] * 2, [params, held], chat_template=template)
    for answer in answers:
        assert list(answer.outputs[0].token_ids).index(end) == 3
    assert lone.tokenizer.decode(answers[1].outputs[0].token_ids[4:]) in CHOICES
    with pytest.raises(InvalidRequestError, match="one token each") as refusal:
        lone.generate("Hello", params)
    assert refusal.value.param == "thinking_token_budget"


def test_a_refused_constraint_leaves_the_engine_as_it_was(lone: LLM) -> None:
    for constraint in (StructuredOutput("regex", "("), StructuredOutput("json", "false")):
        with pytest.raises(InvalidRequestError, match="structured_outputs") as refusal:
            answers(lone, constraint)
        assert refusal.value.param == "structured_outputs"
    assert answers(lone, CONSTRAINTS[3]).outputs[0].text in CHOICES


def greedy_answers(llm: LLM) -> list[list[object]]:
    params = SamplingParams(temperature=0.0, max_tokens=24)
    held = [msgspec.structs.replace(params, structured_outputs=each) for each in CONSTRAINTS]
    return [bits(output) for output in llm.generate(["Hello"] * len(held), held)]


@pytest.fixture(scope="module")
def screening(model_path: Path) -> Iterator[LLM]:
    if not {*SCREENING_PATHS} & {*usable_paths()}:
        pytest.skip("this machine's CPU screens no LM head")
    with LLM(str(model_path), lm_head_screen="on", dtype="float32", cpu_threads=1) as llm:
        yield llm


def test_greedy_tokens_of_a_screened_lm_head_are_those_of_all_logits(
    lone: LLM, screening: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_found = 0
    find = LMHeadScreening._find

    def counting(self: LMHeadScreening, hidden: Any, masks: Any) -> list[int] | None:
        nonlocal num_found
        tokens = find(self, hidden, masks)
        num_found += tokens is not None and any(masks)
        return tokens

    monkeypatch.setattr(LMHeadScreening, "_find", counting)
    expected = greedy_answers(lone)
    for _ in range(10):  # masks come when they come, so how many steps have some differs
        assert greedy_answers(screening) == expected
        if num_found > 10:
            break
    assert num_found > 10


def test_a_screen_without_masks_would_be_caught(
    lone: LLM, screening: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(self: LMHeadScreening, hidden: Any, masks: Any) -> list[int] | None:
        tokens = self._tokens(hidden, ())  # in every step: it leaves out none after a doubtful one
        return tokens if min(tokens) >= 0 else None

    monkeypatch.setattr(LMHeadScreening, "_find", find)
    try:
        answers = greedy_answers(screening)
    except InvalidRequestError:  # its grammar does not allow what was sampled
        return
    assert answers != greedy_answers(lone)
