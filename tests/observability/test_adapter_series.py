from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lora_serve.observability.adapter_series import OTHER, AdapterCounter


def test_the_longest_silent_adapter_is_folded_into_other() -> None:
    counter = AdapterCounter(max_series=2)
    counter.add("a", 5)
    counter.add("b", 1)
    counter.add("a", 1)
    counter.add("c", 1)
    assert counter.totals() == {"a": 6, "c": 1, OTHER: 1}


def test_an_adapter_that_comes_back_starts_anew() -> None:
    counter = AdapterCounter(max_series=1)
    counter.add("a", 5)
    counter.add("b", 2)
    counter.add("a", 1)
    assert counter.totals() == {"a": 1, OTHER: 7}


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 9))))
def test_nothing_is_lost_and_other_never_shrinks(additions: list[tuple[str, int]]) -> None:
    counter = AdapterCounter(max_series=3)
    other = 0
    for lora_name, amount in additions:
        counter.add(lora_name, amount)
        totals = counter.totals()
        assert totals.get(OTHER, 0) >= other
        other = totals.get(OTHER, 0)
    assert sum(counter.totals().values()) == sum(amount for _, amount in additions)
    assert len(counter.totals()) <= 4
