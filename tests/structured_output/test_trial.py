"""What becomes of constraints on trial, and of the processes that try them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from lora_serve.structured_output.trial import Outcome, TrialProcess, TrialStarter
from lora_serve.structured_outputs import StructuredOutput


class Panic(BaseException):
    """A panic as pyo3 raises it, which is no Exception."""


class _Matcher:
    def bitmask(self) -> bytes:
        return b"1"


class _Grammar:
    def matcher(self) -> _Matcher:
        return _Matcher()


class Library:
    """Does what the constraint's text says."""

    def compile(self, constraint: StructuredOutput) -> _Grammar:
        match constraint.text:
            case "panic":
                raise Panic("index out of bounds")
            case "memory":
                raise MemoryError
            case "depth":
                raise RecursionError
            case "abort":
                os.abort()
            case "no files":
                raise OSError("too many open files")
            case "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "kills its parent":
                os.kill(os.getppid(), signal.SIGKILL)
            case "sleep":
                time.sleep(60)
        return _Grammar()


@pytest.fixture(scope="module")
def trial() -> Iterator[TrialProcess]:
    starter = TrialStarter(Library(), seconds=1.0, max_bytes=64 * 2**20)
    trial = TrialProcess(starter)
    yield trial
    trial._forget()
    starter._socket.close()


def outcome(trial: TrialProcess, text: str) -> Outcome:
    trial.begin(StructuredOutput("regex", text))
    return trial.outcome()


def test_what_can_be_compiled_is_sound(trial: TrialProcess) -> None:
    assert outcome(trial, "a+").is_sound


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("panic", "by an error in the library: Panic('index out of bounds'); change it"),
        ("memory", "takes more than 64 MiB of memory; simplify it"),
        ("depth", "nests too deep"),
        ("abort", "takes more than 64 MiB of memory, or nests too deep"),
        ("sleep", "takes more than 1 s; simplify it, or raise --structured-outputs-config"),
    ],
)
def test_a_constraint_is_refused_for_what_it_did(
    text: str, reason: str, trial: TrialProcess
) -> None:
    refused = outcome(trial, text)
    assert reason in refused.error
    assert not refused.failure


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("no files", "too many open files"),
        ("is killed", "ended with wait status 9"),
        ("kills its parent", "has died"),
    ],
)
def test_what_others_did_to_a_trial_says_nothing_of_its_constraint(
    text: str, reason: str, trial: TrialProcess
) -> None:
    failed = outcome(trial, text)
    assert reason in failed.failure
    assert not failed.error
    assert outcome(trial, "a+").is_sound


def test_a_process_that_died_idle_is_replaced(trial: TrialProcess) -> None:
    outcome(trial, "a+")
    outcome(trial, "kills its parent")
    assert [outcome(trial, "a+").is_sound for _ in range(2)] == [True, True]


def test_a_trial_that_is_cancelled_ends_at_once(trial: TrialProcess) -> None:
    begin = time.monotonic()
    trial.begin(StructuredOutput("regex", "sleep"))
    trial.cancel()
    assert trial.outcome().is_cancelled
    assert time.monotonic() - begin < 0.9


def test_a_trial_that_is_cancelled_when_it_is_over_disturbs_no_other(trial: TrialProcess) -> None:
    outcome(trial, "a+")
    trial.cancel()
    assert outcome(trial, "a+").is_sound
