from __future__ import annotations

import pytest

from lora_serve.engine.frontend.watchdog import Watchdog
from lora_serve.errors import EngineDeadError


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_standing_still_is_a_fault_only_while_somebody_waits() -> None:
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
