from __future__ import annotations

import pytest

from lora_serve.engine.frontend.watchdog import Watchdog
from lora_serve.errors import EngineDeadError


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_standing_still_is_a_fault_only_while_a_request_waits() -> None:
    clock = Clock()
    watchdog = Watchdog(10, clock)
    clock.now = 1000
    watchdog.check(0)
    watchdog.note_request(0)
    clock.now += 10
    watchdog.check(1)
    clock.now += 1
    with pytest.raises(EngineDeadError, match=r"2 waiting.* for 11 s \(--step-timeout 10\)"):
        watchdog.check(2)
    watchdog.note_step()
    watchdog.check(2)


def test_others_that_come_meanwhile_do_not_excuse_the_engine() -> None:
    clock = Clock()
    watchdog = Watchdog(10, clock)
    watchdog.note_request(0)
    clock.now += 11
    watchdog.note_request(1)
    with pytest.raises(EngineDeadError):
        watchdog.check(2)


def test_zero_is_content_with_anything() -> None:
    clock = Clock()
    watchdog = Watchdog(0, clock)
    watchdog.note_request(0)
    clock.now += 10**6
    watchdog.check(1)


def test_an_engine_that_answers_does_not_hang_however_long_it_makes_no_step() -> None:
    clock = Clock()
    watchdog = Watchdog(10, clock)
    watchdog.note_request(0)
    for _ in range(50):
        clock.now += 1
        if watchdog.must_ask(1):
            watchdog.note_asked()
            assert not watchdog.hangs(1)
            watchdog.note_reply()
        assert not watchdog.hangs(1)


def test_an_engine_that_answers_nothing_for_the_timeout_hangs() -> None:
    clock = Clock()
    watchdog = Watchdog(10, clock)
    watchdog.note_request(0)
    clock.now = 5
    assert not watchdog.must_ask(1)
    clock.now = 5.5
    assert watchdog.must_ask(1)
    assert not watchdog.must_ask(0), "nobody waits"
    watchdog.note_asked()
    assert not watchdog.must_ask(1), "it has been asked"
    clock.now = 10
    assert not watchdog.hangs(1)
    clock.now = 11
    assert watchdog.hangs(1)
    assert not watchdog.hangs(0)
    watchdog.note_step()
    assert not watchdog.hangs(1)


def test_an_engine_is_asked_before_it_is_blamed_for_this_process_standing_still() -> None:
    clock = Clock()
    watchdog = Watchdog(10, clock)
    watchdog.note_request(0)
    clock.now = 1000
    assert not watchdog.hangs(1)
    watchdog.note_asked()
    clock.now = 1004
    assert not watchdog.hangs(1), "its reply may wait to be read"
    clock.now = 1006
    assert watchdog.hangs(1)
