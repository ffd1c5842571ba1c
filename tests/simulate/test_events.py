from __future__ import annotations

import pytest

from lora_serve.simulate.events import EventQueue


def test_things_happen_in_the_order_of_their_times_and_then_of_their_planning() -> None:
    events, seen = EventQueue(), list[str]()
    events.at(2.0, lambda: seen.append("late"))
    events.at(1.0, lambda: seen.append("first"))
    events.at(1.0, lambda: events.at(1.0, lambda: seen.append("third")))
    events.at(1.0, lambda: seen.append("second"))
    events.run()
    assert seen == ["first", "second", "third", "late"]
    assert (events.now, events.num_events) == (2.0, 5)


def test_nothing_is_planned_for_a_time_that_is_past() -> None:
    events = EventQueue()
    events.at(1.0, lambda: events.at(0.5, lambda: None))
    with pytest.raises(AssertionError, match="is past"):
        events.run()
