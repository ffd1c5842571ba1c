"""Grammars have turns, however many answers follow each."""

from __future__ import annotations

from lora_serve.structured_output.turns import Turns
from lora_serve.structured_outputs import StructuredOutput

BUSY = StructuredOutput.of(regex="a+")
QUIET = StructuredOutput.of(regex="b+")


def busy_turns() -> Turns[str]:
    turns: Turns[str] = Turns()
    for i in range(100):
        turns.put(f"busy {i}", BUSY, f"busy {i}", is_first=False)
    return turns


def test_a_grammar_with_one_answer_waits_for_one_mask_of_each_other() -> None:
    turns = busy_turns()
    turns.put("quiet", QUIET, "quiet", is_first=False)
    turns.put("new", BUSY, "new", is_first=True)
    assert [turns.take() for _ in range(4)] == ["busy 0", "quiet", "new", "busy 1"]


def test_what_is_closed_has_no_turn() -> None:
    turns = busy_turns()
    turns.put("quiet", QUIET, "quiet", is_first=False)
    for name in ("busy 0", "quiet", "of no answer"):
        turns.discard(name)
    taken = []
    while turns:
        taken.append(turns.take())
    assert taken == [f"busy {i}" for i in range(1, 100)]
