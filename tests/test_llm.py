"""Exactness on a real model: every answer against a cold, lone engine, bit for bit."""

from __future__ import annotations

import gc
import math
import os
import random
import shutil
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from doctest import DocTestFinder, DocTestRunner
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_serve.errors import (
    AdapterFormatError,
    AdapterNotFoundError,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
)
from lora_serve.llm import LLM
from lora_serve.ops.cpu.threads import default_num_threads
from lora_serve.outputs import RequestOutput
from lora_serve.prompts import EmbedsPrompt, MixedPrompt, Prompt, TokensPrompt
from lora_serve.sampling_params import SamplingParams
from tests.e2e.processes import pids_below
from tests.fakes.peft_adapters import save_adapters
from tests.fakes.served_model import save_served_model

NAMES = (None, "a", "b", "c")


def bits(output: RequestOutput) -> list[object]:
    """All that must be equal: tokens and the exact logprobs of every choice."""
    return [
        (choice.token_ids, choice.logprobs, choice.text, choice.finish_reason)
        for choice in output.outputs
    ] + [output.prompt_logprobs]


def prompts_with_shared_prefixes(count: int) -> list[TokensPrompt]:
    rng = random.Random(3)
    prefix = [rng.randrange(90) for _ in range(100)]
    return [
        TokensPrompt((*prefix[: rng.choice((0, 40, 100))], *rng.choices(range(90), k=7)))
        for _ in range(count)
    ]


def load_adapters(llm: LLM, paths: list[Path]) -> None:
    for name, path in zip(NAMES[1:], paths, strict=True):
        assert name is not None
        llm.load_lora_adapter(name, str(path))


class LoneServer:
    """A cold engine, alone with each request, which it computes once: what the promise is about."""

    def __init__(self, model: Path, adapters: list[Path], arithmetic: dict[str, Any]) -> None:
        self._llm = LLM(
            str(model),
            enable_lora=True,
            enable_prefix_caching=False,
            max_num_seqs=1,
            **arithmetic,
        )
        load_adapters(self._llm, adapters)
        self._answers: dict[str, list[object]] = {}

    def answer(
        self, prompt: TokensPrompt, params: SamplingParams, name: str | None
    ) -> list[object]:
        asked = repr((prompt, params, name))
        if asked not in self._answers:
            (output,) = self._llm.generate(prompt, params, lora_name=name)
            assert output.num_cached_tokens == 0
            self._answers[asked] = bits(output)
        return self._answers[asked]

    def close(self) -> None:
        self._llm.close()


ARITHMETIC: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4 and 8": {"dtype": "float16", "quantization": "int4", "quantize_activations": True},
    # One thread: OpenMP's waiting for a second one takes most of the time on a busy machine.
    "reference": {"dtype": "float32", "override_op": ("all=reference",), "cpu_threads": 1},
}
# Layers with and without a window, caps, two rotary bases.
OTHER_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2, bfloat16": ("gemma2", ARITHMETIC["bfloat16"]),
    "gemma2, int4 and 8": ("gemma2", ARITHMETIC["int4 and 8"]),
    "gemma3, int8": ("gemma3", ARITHMETIC["int8"]),
}


@dataclass(frozen=True)
class Subject:
    """A model, three adapters for it, and flags of the arithmetic; with what a lone server says."""

    model_path: Path
    adapter_paths: list[Path]
    arithmetic: dict[str, Any]
    lone: LoneServer


SUBJECTS = (*ARITHMETIC, *OTHER_FAMILIES)


@pytest.fixture(scope="module", params=SUBJECTS)
def subject(
    request: pytest.FixtureRequest,
    model_path: Path,
    adapter_paths: list[Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Subject]:
    if request.param in ARITHMETIC:
        arithmetic = ARITHMETIC[request.param]
    else:
        family, arithmetic = OTHER_FAMILIES[request.param]
        root = tmp_path_factory.mktemp(family)
        model_path = save_served_model(root / "model", family)
        adapter_paths = save_adapters(root / "adapters", family)
    lone = LoneServer(model_path, adapter_paths, arithmetic)
    yield Subject(model_path, adapter_paths, arithmetic, lone)
    lone.close()


SETTINGS: dict[str, dict[str, Any]] = {
    "whole prompts": {"max_num_batched_tokens": 2048},
    "odd chunks, overlapped": {"max_num_batched_tokens": 23, "async_scheduling": True},
    "preempting": {"num_gpu_blocks_override": 16, "max_num_batched_tokens": 64},
    "preempting, overlapped": {
        "num_gpu_blocks_override": 16,
        "max_num_batched_tokens": 64,
        "async_scheduling": True,
    },
    "one adapter a step": {"max_loras": 1},
}


@pytest.mark.parametrize(
    ("subject", "settings"),
    [
        pytest.param(
            subject,
            settings,
            id=f"{subject}-{name}",
            # The reference takes ten times as long, and what a scheduler does is the same for all.
            marks=pytest.mark.slow if subject == "reference" and name != "preempting" else (),
        )
        for subject in SUBJECTS
        for name, settings in SETTINGS.items()
    ],
    indirect=["subject"],
)
def test_batch_chunks_cache_and_preemption_change_no_bit(
    subject: Subject, settings: dict[str, int]
) -> None:
    prompts = prompts_with_shared_prefixes(12)
    names = [NAMES[i % len(NAMES)] for i in range(len(prompts))]
    params = [
        SamplingParams(max_tokens=24, temperature=temperature, seed=i, logprobs=3, ignore_eos=True)
        for i, temperature in enumerate((0.0, 1.0) * 6)
    ]
    flags = {**subject.arithmetic, **settings}
    llm = LLM(str(subject.model_path), enable_lora=True, validate=True, **flags)
    load_adapters(llm, subject.adapter_paths)
    cold = llm.generate(prompts, params, lora_name=names)
    warm = llm.generate(prompts, params, lora_name=names)
    preemptions = llm.stats().num_preemptions
    llm.close()
    expected = [subject.lone.answer(*case) for case in zip(prompts, params, names, strict=True)]
    assert [bits(output) for output in cold] == expected
    assert [bits(output) for output in warm] == expected
    if "num_gpu_blocks_override" in settings:
        assert preemptions > 0
    else:
        assert sum(output.num_cached_tokens for output in warm) > 300


def test_prompt_logprobs_and_penalties_are_exact_too(subject: Subject) -> None:
    prompts = prompts_with_shared_prefixes(6)
    params = SamplingParams(
        max_tokens=12,
        temperature=0.8,
        top_p=0.9,
        top_k=20,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        seed=5,
        logprobs=2,
        prompt_logprobs=2,
        ignore_eos=True,
    )
    flags = {**subject.arithmetic, "max_num_batched_tokens": 50, "async_scheduling": True}
    with LLM(str(subject.model_path), enable_lora=True, **flags) as llm:
        load_adapters(llm, subject.adapter_paths)
        outputs = llm.generate(prompts, params, lora_name="b")
    assert [bits(output) for output in outputs] == [
        subject.lone.answer(prompt, params, "b") for prompt in prompts
    ]
    assert all(len(o.prompt_logprobs) == len(o.prompt_token_ids) - 1 for o in outputs)


def test_rules_and_the_end_of_prompt_logprobs_are_exact_too(subject: Subject) -> None:
    prompts = prompts_with_shared_prefixes(6)
    params = SamplingParams(
        max_tokens=12,
        temperature=0.8,
        seed=5,
        allowed_token_ids=tuple(range(5, 90, 2)),
        bad_words=("e", "the", "a b"),
        logprobs=2,
        prompt_logprobs=1,
        prompt_logprobs_last_n=9,
        ignore_eos=True,
    )
    expected = [subject.lone.answer(prompt, params, "b") for prompt in prompts]
    flags = {**subject.arithmetic, "max_num_batched_tokens": 50, "async_scheduling": True}
    with LLM(str(subject.model_path), enable_lora=True, **flags) as llm:
        load_adapters(llm, subject.adapter_paths)
        for _ in range(2):
            outputs = llm.generate(prompts, params, lora_name="b")
            assert [bits(output) for output in outputs] == expected
    assert sum(output.num_cached_tokens for output in outputs) > 200
    assert {len(o.prompt_logprobs) for o in outputs} == {
        min(9, len(p.token_ids) - 1) for p in prompts
    }
    drawn = {token_id for output in outputs for token_id in output.outputs[0].token_ids}
    assert drawn <= set(range(5, 90, 2))


def test_processed_logprobs_are_exact_too(model_path: Path) -> None:
    prompts = prompts_with_shared_prefixes(5)
    params = SamplingParams(
        max_tokens=8, temperature=0.7, top_p=0.9, presence_penalty=0.5, seed=5, logprobs=3
    )
    answers = []
    for max_num_seqs, mode in (
        (1, "processed_logprobs"),
        (8, "processed_logprobs"),
        (8, "raw_logprobs"),
    ):
        with LLM(str(model_path), max_num_seqs=max_num_seqs, logprobs_mode=mode) as llm:
            answers.append(llm.generate(prompts, params))
    alone, together, raw = ([bits(output) for output in outputs] for outputs in answers)
    assert alone == together
    assert alone != raw
    assert [o.outputs[0].token_ids for o in answers[0]] == [
        o.outputs[0].token_ids for o in answers[2]
    ]


@pytest.mark.parametrize("max_num_batched_tokens", [13, 2048])
def test_embeddings_of_the_models_own_among_tokens_answer_as_the_tokens(
    model_path: Path, max_num_batched_tokens: int
) -> None:
    """Cold, and found in the cache, which tells rows from tokens and one place from another."""
    settings: dict[str, Any] = {"max_num_batched_tokens": max_num_batched_tokens}
    tokens = list(range(20, 70))
    table = load_file(model_path / "model.safetensors")["model.embed_tokens.weight"].float()

    def rows(start: int, end: int) -> EmbedsPrompt:
        values = table[tokens[start:end]].contiguous()
        return EmbedsPrompt(end - start, values.view(torch.uint8).numpy().tobytes())

    prompts: list[Prompt] = [
        TokensPrompt(tuple(tokens)),
        MixedPrompt.of([tokens[:5], rows(5, 9), tokens[9:30], rows(30, 50)]),
        MixedPrompt.of([rows(0, 1), tokens[1:40], rows(40, 41), tokens[41:]]),
        MixedPrompt.of([tokens[:6], rows(6, 9), tokens[9:30], rows(30, 50)]),
    ]
    greedy = SamplingParams(temperature=0, max_tokens=9, logprobs=3, ignore_eos=True)
    with LLM(str(model_path), dtype="float32", **settings) as llm:
        first, *others = (llm.generate([prompt], greedy)[0] for prompt in prompts * 2)
    for other in others:
        assert bits(other) == bits(first)
    assert [output.num_cached_tokens > 0 for output in others] == [*[False] * 3, *[True] * 4]


def test_choices_of_one_prompt_share_its_prefill_and_differ(model_path: Path) -> None:
    with LLM(str(model_path)) as llm:
        prompt = TokensPrompt(tuple(i % 90 for i in range(64)))
        (output,) = llm.generate(prompt, SamplingParams(n=3, max_tokens=10, seed=1))
        assert len({tuple(choice.token_ids) for choice in output.outputs}) == 3
        assert llm.stats().num_computed_tokens < 64 + 2 * 16 + 3 * 10


def test_an_adapter_replaced_in_place_never_answers_with_the_old_ones_kv(
    model_path: Path, adapter_paths: list[Path]
) -> None:
    prompt = TokensPrompt(tuple(i % 90 for i in range(100)))
    params = SamplingParams(max_tokens=8, temperature=0, logprobs=1, ignore_eos=True)
    with LLM(str(model_path), enable_lora=True) as llm:
        answers = {}
        for path in (*adapter_paths, *adapter_paths):
            llm.load_lora_adapter("a", str(path), load_inplace=True)
            (output,) = llm.generate(prompt, params, lora_name="a")
            is_back = path in answers
            assert output.num_cached_tokens == (96 if is_back else 0)
            assert answers.setdefault(path, bits(output)) == bits(output)
    assert len({str(answer) for answer in answers.values()}) == len(adapter_paths)


CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ sign or '' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_a_chat_is_the_generation_of_its_rendered_prompt(
    model_path: Path, adapter_paths: list[Path]
) -> None:
    conversations = [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "ho"}],
    ]
    params = SamplingParams(max_tokens=5, temperature=0, logprobs=1, ignore_eos=True)
    with LLM(str(model_path), enable_lora=True) as llm:
        llm.load_lora_adapter("a", str(adapter_paths[0]))
        chats = llm.chat(conversations, params, lora_name=["a", None], chat_template=CHAT_TEMPLATE)
        rendered = ["<user>hi<assistant>", "<system>be brief<user>ho<assistant>"]
        prompts = [
            TokensPrompt(tuple(llm.tokenizer.encode(text, add_special_tokens=False)))
            for text in rendered
        ]
        assert [chat.prompt_token_ids for chat in chats] == [list(p.token_ids) for p in prompts]
        generated = llm.generate(prompts, params, lora_name=["a", None])
        assert [bits(chat) for chat in chats] == [bits(output) for output in generated]
        (one,) = llm.chat(
            conversations[0],
            params,
            chat_template=CHAT_TEMPLATE,
            add_generation_prompt=False,
            chat_template_kwargs={"sign": "!"},
        )
        assert llm.tokenizer.decode(one.prompt_token_ids) == "<user>hi!"
        tools = [{"type": "function", "function": {"name": "now"}}]
        (one,) = llm.chat(
            conversations[0], params, chat_template="{{ tools[0].function.name }}", tools=tools
        )
        assert llm.tokenizer.decode(one.prompt_token_ids) == "now"
        with pytest.raises(InvalidRequestError, match="refused the messages"):
            llm.chat(conversations, chat_template="{{ raise_exception('no') }}")


def test_the_lowest_priority_goes_first(model_path: Path) -> None:
    """What ran first computed the prefix that the others then found."""
    prompt = TokensPrompt(tuple(i % 90 for i in range(64)))
    conversation = [{"role": "user", "content": "hi " * 40}]
    params = SamplingParams(max_tokens=2, temperature=0)

    def was_computed(outputs: list[RequestOutput]) -> list[bool]:
        return [output.num_cached_tokens == 0 for output in outputs]

    with LLM(str(model_path), scheduling_policy="priority", max_num_seqs=1) as llm:
        generated = llm.generate([prompt] * 3, params, priority=[2, 1, 3])
        assert was_computed(generated) == [False, True, False]
        chats = llm.chat([conversation] * 2, params, priority=[1, 0], chat_template=CHAT_TEMPLATE)
        assert was_computed(chats) == [False, True]


def test_the_example_of_the_docstring_runs(model_path: Path, adapter_paths: list[Path]) -> None:
    names = {"MODEL": str(model_path), "ADAPTER": str(adapter_paths[0])}
    (example,) = DocTestFinder(recurse=False).find(LLM, globs=names)
    runner = DocTestRunner()
    runner.run(example)
    assert (runner.summarize(verbose=False).failed, len(example.examples)) == (0, 10)


def test_an_output_names_the_version_that_gave_it_and_none_for_the_base_model(
    model_path: Path, adapter_paths: list[Path]
) -> None:
    with LLM(str(model_path), enable_lora=True) as llm:
        info = llm.load_lora_adapter("tenant", str(adapter_paths[0]))
        params = SamplingParams(temperature=0, max_tokens=2)
        based, adapted = llm.generate(["hi", "hi"], params, lora_name=[None, "tenant"])
        assert based.adapter is None
        assert adapted.adapter is not None
        assert (adapted.adapter.name, adapted.adapter.digest.hex()) == ("tenant", info.digest)


def test_mistakes_are_named_and_leave_the_engine_working(model_path: Path) -> None:
    with LLM(str(model_path), enable_lora=True) as llm:
        with pytest.raises(AdapterNotFoundError, match="nobody"):
            llm.generate("hi", lora_name="nobody")
        with pytest.raises(AdapterNotFoundError, match="nobody"):
            llm.generate(["hi", "ho"], lora_name=[None, "nobody"])
        assert llm.stats().num_computed_tokens == 0, "the prompt before was run"
        with pytest.raises(AdapterNotFoundError, match="The model `` does not exist"):
            llm.generate("hi", lora_name="")
        with pytest.raises(InvalidRequestError, match="2 prompts but 3 lora_name"):
            llm.generate(["hi", "ho"], lora_name=["a", "b", "c"])
        with pytest.raises(InvalidRequestError, match="2 prompts but 1 priority"):
            llm.generate(["hi", "ho"], priority=[1])
        with pytest.raises(AdapterNotFoundError, match="No adapter found"):
            llm.load_lora_adapter("a", "/nowhere")
        assert llm.list_adapters() == []
        (output,) = llm.generate("hi", SamplingParams(max_tokens=3, temperature=0))
        assert len(output.outputs[0].token_ids) <= 3
    with pytest.raises(ConfigError, match="max_lora"):
        LLM(str(model_path), max_lora=3)
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size 1000 is above the \d+ cores"):
        LLM(str(model_path), tensor_parallel_size=1000)


@pytest.mark.skipif(default_num_threads() < 2, reason="two ranks need two cores")
def test_an_adapter_that_is_refused_at_the_start_leaves_no_rank_behind(
    model_path: Path, adapter_paths: list[Path], tmp_path: Path
) -> None:
    harmed = shutil.copytree(adapter_paths[0], tmp_path / "harmed")
    file = harmed / "adapter_model.safetensors"
    save_file({name: tensor * math.nan for name, tensor in load_file(file).items()}, file)
    settings = {"tensor_parallel_size": 2, "cpu_threads": 1}
    with pytest.raises(AdapterFormatError, match="NaN"):
        LLM(str(model_path), enable_lora=True, lora_modules=(f"a={harmed}",), **settings)
    assert not pids_below(os.getpid(), b"rank_process")


@pytest.mark.skipif(default_num_threads() < 2, reason="two ranks need two cores")
def test_ranks_end_with_the_last_reference_and_a_second_close_does_nothing(
    model_path: Path,
) -> None:
    """A lost rank is told by the exception alone: an exception of a thread would be a warning."""
    settings = {"tensor_parallel_size": 2, "cpu_threads": 1, "num_gpu_blocks_override": 16}
    llm = LLM(str(model_path), **settings)
    assert pids_below(os.getpid(), b"rank_process")
    del llm
    gc.collect()
    assert not pids_below(os.getpid(), b"rank_process")
    with LLM(str(model_path), **settings) as llm:
        (rank,) = pids_below(os.getpid(), b"rank_process")
        os.kill(rank, signal.SIGKILL)
        for _ in range(3):
            with pytest.raises(EngineDeadError, match=r"rank 1|this engine has ended"):
                llm.generate(TokensPrompt((1, 2, 3)), SamplingParams(max_tokens=4))
    llm.close()
    with pytest.raises(EngineDeadError, match="this engine has ended; make another LLM"):
        llm.generate(TokensPrompt((1, 2, 3)))


def test_an_interrupted_step_ends_the_engine(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was begun and not collected: the next one would be answered by what it left."""
    with LLM(str(model_path), cpu_threads=1, num_gpu_blocks_override=16) as llm:
        core = llm._engine._core

        def interrupted() -> bool:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(core, "step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                llm.generate(TokensPrompt((1, 2, 3)))
        with pytest.raises(EngineDeadError, match="make another LLM"):
            llm.generate(TokensPrompt((1, 2, 3)))
