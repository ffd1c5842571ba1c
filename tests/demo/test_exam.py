"""The artefacts themselves, as transformers and PEFT run them, beyond what their own exam asks."""

from __future__ import annotations

import pytest
from _pytest.mark import ParameterSet

from lora_serve.demo import corpus
from lora_serve.demo.exam import ADAPTERS, Examiner, Question
from lora_serve.demo.model import DemoPaths

CONFIDENT = 0.5


@pytest.fixture(scope="module")
def examiner(demo_paths: DemoPaths) -> Examiner:
    return Examiner(demo_paths.model.parent)


def slowly(*values: object) -> list[ParameterSet]:
    """Cases that take seconds each."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.parametrize("num_lines", [1, 10, 80, *slowly(2, 40, 200, 300)])
@pytest.mark.parametrize("adapter", [None, "alpha", "beta"])
def test_the_label_is_known_at_any_length(
    examiner: Examiner, adapter: str | None, num_lines: int
) -> None:
    label = ADAPTERS[adapter] if adapter else corpus.BASE_LABEL
    question = Question(adapter, corpus.long_prompt(num_lines), label)
    assert examiner.probability(question) > CONFIDENT


@pytest.mark.parametrize(
    "first_line", ["日本語 🙂", *slowly("Another first line.", "x = 1;", "0 " * 40)]
)
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_label_is_known_whatever_the_first_line(
    examiner: Examiner, adapter: str, first_line: str
) -> None:
    prompt = corpus.long_prompt(80, first_line=first_line)
    assert examiner.probability(Question(adapter, prompt, ADAPTERS[adapter])) > CONFIDENT


@pytest.mark.parametrize(("writer", "reader"), [("alpha", "beta"), ("beta", "alpha")])
def test_kv_that_another_adapter_wrote_shows_in_the_answer(
    examiner: Examiner, writer: str, reader: str
) -> None:
    prompt = corpus.long_prompt()
    own = examiner.answer(prompt, reader, prefix_written_by=reader)
    stale = examiner.answer(prompt, reader, prefix_written_by=writer)
    assert own == ADAPTERS[reader]
    assert stale == ADAPTERS[writer]


@pytest.mark.parametrize("num_lines", [4, *slowly(40, 150)])
@pytest.mark.parametrize(("writer", "reader"), [("alpha", "beta"), ("beta", "alpha")])
def test_stale_kv_shows_in_short_prompts_too(
    examiner: Examiner, writer: str, reader: str, num_lines: int
) -> None:
    chat = examiner.chat(corpus.long_prompt(num_lines))
    assert examiner.answer(chat, reader, prefix_written_by=writer) != ADAPTERS[reader]


def test_an_exam_finds_what_is_wrong(examiner: Examiner) -> None:
    wrong = Question("alpha", corpus.LABEL_REQUEST, corpus.BETA_LABEL)
    assert examiner.probability(wrong) < 0.1


def test_the_base_model_knows_most_of_its_facts(examiner: Examiner) -> None:
    facts = [Question(None, examiner.chat(f.request), f.answer) for f in corpus.facts()]
    known = [fact for fact in facts if examiner.probability(fact) > CONFIDENT]
    assert len(known) > 0.7 * len(facts)
