from __future__ import annotations

import json
import os
import subprocess
from random import Random

import pytest

from benchmarks.common.processes import num_processes
from benchmarks.soak.schemas import NUM_KEPT, Diary, Look, Plan, checks, fault_of, good_schema
from lora_serve.structured_output.wire import GrammarSettings

PLAN = Plan(num_schemas=300, seconds=60.0, seed=1, num_clients=1)


def a_diary(grammars: list[int]) -> Diary:
    """grammars: MiB of the process that follows them, look by look."""
    diary = Diary(grammar_pids={7}, plain_texts={"once"})
    diary.counts.update(answered=270, refused=30, plain=9)
    diary.looks += [Look(90, 400, mib, 6, 200 + at) for at, mib in enumerate(grammars)]
    return diary


def failed(diary: Diary) -> list[str]:
    return [check.title for check in checks(PLAN, diary) if not check.passed]


def test_a_soak_in_which_memory_keeps_its_level_passes() -> None:
    assert failed(a_diary([300] * 90)) == []


def test_a_process_that_keeps_every_grammar_fails_it() -> None:
    assert failed(a_diary([300 + at for at in range(90)])) == ["memory of grammars, MiB"]


@pytest.mark.parametrize(
    ("change", "title"),
    [
        (lambda diary: diary.counts.update(unexpected=1), "no unexpected answer"),
        (lambda diary: diary.plain_texts.add("twice"), "the plain answer stays"),
        (lambda diary: diary.grammar_pids.add(8), "one process follows grammars"),
        (
            lambda diary: diary.looks.append(Look(90, 400, 300, 10, 290)),
            "no process is left behind",
        ),
    ],
)
def test_one_thing_that_should_not_be_fails_it(change: object, title: str) -> None:
    diary = a_diary([300] * 90)
    assert callable(change)
    change(diary)
    assert failed(diary) == [title]


def test_an_answer_is_judged_by_its_schema() -> None:
    schema = good_schema(5, Random(1))

    def told(answer: object, finish_reason: str = "stop") -> str:
        choice = {"text": json.dumps(answer), "finish_reason": finish_reason}
        return fault_of(schema, 200, json.dumps({"choices": [choice]}))

    assert told({"field_5": 1}) == ""
    assert told("cut of", "length") == ""
    assert "does not match" in told({"field_6": 1})
    assert fault_of(schema, 500, "why").startswith("500")
    assert fault_of(None, 400, "") == ""
    assert "instead of 400" in fault_of(None, 200, "")


def test_it_waits_until_as_many_schemas_were_asked_as_are_kept() -> None:
    fields = dict(zip(GrammarSettings.__struct_fields__[::-1],
                      GrammarSettings.__struct_defaults__[::-1], strict=False))  # fmt: skip
    assert fields["max_grammars"] == NUM_KEPT


def test_processes_are_counted_with_their_children() -> None:
    before = num_processes(os.getpid())
    with subprocess.Popen(["sh", "-c", "echo; read line"], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert num_processes(os.getpid()) == before + 1
        child.communicate(b"end")
