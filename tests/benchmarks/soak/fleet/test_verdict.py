from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks.soak.fleet.history import Answer, Change
from benchmarks.soak.fleet.journal import EVERYWHERE, UNEXPECTED, Journal
from benchmarks.soak.fleet.verdict import Record, checks


def journal_of_a_good_run() -> Journal:
    journal = Journal()
    journal.note_change(EVERYWHERE, Change("n", "a", 0, 2, 1, True))
    journal.note_change(EVERYWHERE, Change("n", "b", 1, 3, 2, True))
    journal.note_answer(Answer("n", "b", 4, 5, "p"), 0, "bits")
    return journal


def failed(journal: Journal, finals: list[Answer] | None) -> int:
    record = Record(
        journal=journal, num_names=1, num_kinds_of_faults=1, faults={"kills": 1}, finals=finals
    )
    return sum(not check.passed for check in checks(record))


def test_a_good_run_passes() -> None:
    journal = journal_of_a_good_run()
    assert failed(journal, [Answer("n", "b", 9, 9)]) == 0
    assert journal.stories == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda journal: journal.note_answer(Answer("n", "a", 4, 5), 1, "bits"),
        lambda journal: journal.note_answer(Answer("n", "b", 4, 5, "q"), 0, "other bits"),
        lambda journal: journal.note_change(EVERYWHERE, Change("n", "c", 8, 9, 1)),
        lambda journal: journal.blame(UNEXPECTED, "503"),
    ],
    ids=["another version", "other bits", "a serial out of order", "a refusal"],
)
def test_a_wrong_one_fails_and_says_why(spoil: Callable[[Journal], None]) -> None:
    journal = journal_of_a_good_run()
    spoil(journal)
    assert failed(journal, []) == 1
    assert len(journal.stories) == 1


def test_replicas_that_never_agree_or_agree_on_what_was_replaced_fail() -> None:
    assert failed(journal_of_a_good_run(), None) == 1
    assert failed(journal_of_a_good_run(), [Answer("n", "a", 9, 9)]) == 1
