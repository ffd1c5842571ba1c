from __future__ import annotations

from lora_serve.adapters.findings import listed, shown


def test_a_value_is_shown_as_python_writes_it() -> None:
    assert shown("a\n\ud800") == r"'a\n\ud800'"


def test_a_long_value_is_cut_and_says_so() -> None:
    text = shown("x" * 5000)
    assert text.endswith("… (5002 characters)")
    assert len(text) < 150


def test_a_few_names_are_all_listed() -> None:
    assert listed(["a", "b", "c", "d"]) == "'a', 'b', 'c', 'd'"


def test_of_many_names_the_first_are_listed() -> None:
    assert listed([str(number) for number in range(9)]) == "'0', '1', '2', '3' and 5 more"
