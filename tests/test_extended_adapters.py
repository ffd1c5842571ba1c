"""Adapters with biases, or that change embeddings and LM head, and the bugs that they invite.

Whatever is in the batch, in chunks, from the cache, recorded or screened: the answer of a cold
engine alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_serve.llm import LLM
from lora_serve.ops._cpu import usable_paths
from lora_serve.ops.cpu import backend
from lora_serve.ops.select import available_ops
from lora_serve.prompts import TokensPrompt
from lora_serve.sampling_params import SamplingParams
from lora_serve.worker.adapter_weights import AdapterWeights
from lora_serve.worker.batch_builder import BatchBuilder
from tests.fakes.peft_adapters import make_peft, save_adapter
from tests.test_llm import bits
from tests.worker.test_adapter_vocabulary import KINDS

pytestmark = pytest.mark.skipif("cpu" not in available_ops(), reason="no native CPU kernels")

FLAGS: dict[str, Any] = {
    "dtype": "float32",
    "cpu_threads": 1,
    "enable_lora": True,
    "lm_head_screen": "on",
    "max_logprobs": -1,
}
SHARED = [(11 * i + 7) % 90 for i in range(40)]
NAMES = {"lora": "lora", "tokens": "tokens", "copy": "copy of the head"}
GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
SCORED = SamplingParams(max_tokens=2, temperature=0.0, logprobs=3, prompt_logprobs=2)
DRAWN = SamplingParams(max_tokens=5, temperature=0.9, seed=3, ignore_eos=True)
CASES: list[tuple[str | None, list[int], SamplingParams]] = [
    (name, [*SHARED, index], params)
    for index, name in enumerate((None, *NAMES, "biased"))
    for params in ((GREEDY, SCORED) if name != "biased" else (DRAWN,))
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("vocabulary")
    found = {}
    kinds = {name: KINDS[kind] for name, kind in NAMES.items()}
    kinds["biased"] = {"bias": "all", "lora_bias": True}
    for seed, (name, settings) in enumerate(kinds.items()):
        found[name] = root / name
        save_adapter(make_peft("qwen2", seed, **settings), found[name])
    return found


@pytest.fixture(autouse=True)
def screened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "SCREENING_PATHS", usable_paths())


def make_llm(model_path: Path, paths: dict[str, Path], **settings: Any) -> LLM:
    llm = LLM(str(model_path), validate=True, **{**FLAGS, **settings})
    for name, path in paths.items():
        llm.load_lora_adapter(name, str(path))
    return llm


def answers(llm: LLM, cases: list[tuple[str | None, list[int], SamplingParams]]) -> list[object]:
    outputs = llm.generate(
        [TokensPrompt(tuple(prompt)) for _, prompt, _ in cases],
        [params for _, _, params in cases],
        lora_name=[name for name, _, _ in cases],
    )
    return [bits(output) for output in outputs]


@pytest.fixture(scope="module")
def right(model_path: Path, paths: dict[str, Path]) -> Iterator[list[object]]:
    lone = {"enable_prefix_caching": False, "max_num_seqs": 1, "enforce_eager": True}
    with make_llm(model_path, paths, **lone, lm_head_screen="off") as llm:
        yield [answers(llm, [case])[0] for case in CASES]


def is_right(model_path: Path, paths: dict[str, Path], right: list[object]) -> bool:
    with make_llm(model_path, paths, max_num_seqs=16, max_num_batched_tokens=64) as llm:
        return answers(llm, CASES) == right and answers(llm, CASES) == right


def test_all_of_them_at_once_answer_as_alone(
    model_path: Path, paths: dict[str, Path], right: list[object]
) -> None:
    assert is_right(model_path, paths, right)
    first = [answer for answer, case in zip(right, CASES, strict=True) if case[2] is GREEDY]
    assert len({repr(each) for each in first}) == len(first)


def test_prompt_logprobs_are_those_of_peft(model_path: Path, paths: dict[str, Path]) -> None:
    prompt = CASES[3][1]
    with make_llm(model_path, {"lora": paths["lora"]}) as llm:
        (output,) = llm.generate(TokensPrompt(tuple(prompt)), SCORED, lora_name="lora")
    with torch.no_grad():
        peft = make_peft("qwen2", 0, **KINDS["lora"])
        expected = peft(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
    told = torch.tensor([each.logprob for each in output.prompt_logprobs])
    wanted = torch.stack([expected[i, token] for i, token in enumerate(prompt[1:])])
    torch.testing.assert_close(told, wanted, atol=2e-4, rtol=0)


def screen_all(self: AdapterWeights, requests: Any, counts: Any) -> tuple[()]:
    return ()


@pytest.mark.parametrize("bug", ["the LM head of another", "embeddings of the base", "no biases"])
def test_each_bug_that_they_invite_is_noticed(
    model_path: Path,
    paths: dict[str, Path],
    right: list[object],
    monkeypatch: pytest.MonkeyPatch,
    bug: str,
) -> None:
    if bug == "the LM head of another":
        found = AdapterWeights.head_changes_of

        def shifted(self: AdapterWeights, requests: Any, counts: Any) -> Any:
            changes = found(self, requests, counts)
            return [(start, end, changes[i - 1][2]) for i, (start, end, _) in enumerate(changes)]

        monkeypatch.setattr(AdapterWeights, "head_changes_of", shifted)
    else:
        lay_out, is_of_biases = BatchBuilder.lay_out, bug == "no biases"

        def forgetful(
            self: BatchBuilder, requests: Any, of: Any, changes: Any, biases: Any, experts: Any
        ) -> Any:
            left = (changes, {}) if is_of_biases else ({}, biases)
            return lay_out(self, requests, of, *left, experts)

        monkeypatch.setattr(BatchBuilder, "lay_out", forgetful)
    assert not is_right(model_path, paths, right)


def test_a_screen_of_the_models_own_head_is_noticed(
    model_path: Path, paths: dict[str, Path], right: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A screen is asked for rows whose adapter changes the LM head."""
    cases = [case for case in CASES if case[2] is GREEDY]
    expected = [answer for answer, case in zip(right, CASES, strict=True) if case[2] is GREEDY]
    monkeypatch.setattr(AdapterWeights, "head_changes_of", screen_all)
    with make_llm(model_path, paths) as llm:
        assert answers(llm, cases) != expected
