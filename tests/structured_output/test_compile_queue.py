"""Which constraint is compiled next, and for which answers."""

from __future__ import annotations

from lora_serve.structured_output.compile_queue import CompileQueue
from lora_serve.structured_output.wire import Open
from lora_serve.structured_outputs import StructuredOutput


def constraint(text: str) -> StructuredOutput:
    return StructuredOutput("regex", text)


def opened(request_id: str, text: str, share: str = "") -> Open:
    return Open(request_id, constraint(text), True, share=share)


def order(queue: CompileQueue) -> list[str]:
    taken = []
    while (one := queue.take()) is not None:
        taken.append(one.text)
    return taken


def test_shares_take_turns_however_many_constraints_one_of_them_has() -> None:
    queue = CompileQueue()
    for number in range(5):
        queue.put(opened(f"a{number}", f"a{number}", "a"))
    for number in range(2):
        queue.put(opened(f"b{number}", f"b{number}", "b"))
    assert order(queue) == ["a0", "b0", "a1", "b1", "a2", "a3", "a4"]


def test_a_constraint_of_several_answers_is_compiled_once_at_the_first_ones_turn() -> None:
    queue = CompileQueue()
    for message in (opened("1", "x", "a"), opened("2", "y", "a"), opened("3", "y", "b")):
        queue.put(message)
    assert order(queue) == ["x", "y"]
    assert [message.request_id for message in queue.remove(constraint("y"))] == ["2", "3"]
    assert queue.get("2") is None


def test_a_constraint_for_which_no_answer_waits_is_not_compiled() -> None:
    queue = CompileQueue()
    for message in (opened("1", "x"), opened("2", "x"), opened("3", "y")):
        queue.put(message)
    assert queue.discard("3") is None
    assert queue.discard("1") is None
    assert queue.discard("none") is None
    assert order(queue) == ["x"]
    assert queue._lines == {}


def test_a_constraint_that_is_compiled_for_no_answer_any_more_is_told() -> None:
    queue = CompileQueue()
    queue.put(opened("1", "x"))
    queue.put(opened("2", "x"))
    queue.take()
    assert queue.discard("1") is None
    assert queue.discard("2") == constraint("x")
    queue.put_back(constraint("x"))
    assert order(queue) == []


def test_an_answer_that_comes_after_the_cancelling_is_compiled_for() -> None:
    queue = CompileQueue()
    queue.put(opened("1", "x"))
    queue.take()
    queue.discard("1")
    queue.put(opened("2", "x"))
    assert queue.take() is None
    queue.put_back(constraint("x"))
    assert queue.take() == constraint("x")


def test_an_answer_waits_with_the_tokens_that_were_put_last() -> None:
    queue = CompileQueue()
    queue.put(opened("1", "x"))
    queue.put(Open("1", constraint("x"), True, (7,)))
    queue.take()
    assert [message.token_ids for message in queue.remove(constraint("x"))] == [(7,)]
