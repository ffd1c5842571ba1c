from __future__ import annotations

from statistics import fmean

import pytest

from lora_serve.simulate.deviations import Deviations

RATIOS = {"decode": (0.8, 0.9, 1.0, 1.7), "prefill": (1.2,)}


def drawn(seed: str, number: int = 6) -> list[float]:
    deviations = Deviations(RATIOS, seed)
    return [deviations.draw("decode") for _ in range(number)]


def test_one_seed_gives_the_same_draws_on_every_machine() -> None:
    assert drawn("0 0") == [0.9, 1.7, 1.7, 0.8, 0.9, 0.9]
    assert drawn("0 1") != drawn("0 0")


def test_each_ratio_is_as_likely_as_the_others() -> None:
    many = drawn("1", 4000)
    for ratio in RATIOS["decode"]:
        assert many.count(ratio) == pytest.approx(1000, abs=100)
    assert fmean(many) == pytest.approx(1.1, abs=0.02)


def test_steps_of_a_kind_without_ratios_never_deviate() -> None:
    deviations = Deviations(RATIOS)
    assert {deviations.draw("mixed") for _ in range(9)} == {1.0}
    assert {deviations.draw("prefill") for _ in range(9)} == {1.2}
