from __future__ import annotations

from math import log2

import pytest

from lora_serve.errors import ConfigError
from lora_serve.simulate.sizing import smallest


@pytest.mark.parametrize("least_enough", [1, 2, 3, 7, 8, 9, 100, 999, 1000])
def test_the_smallest_number_is_found_by_few_questions(least_enough: int) -> None:
    asked: list[int] = []

    def is_enough(number: int) -> bool:
        asked.append(number)
        return number >= least_enough

    assert smallest(is_enough, most=1000) == least_enough
    assert len(asked) == len(set(asked)) <= 2 * log2(least_enough) + 2
    assert max(asked) <= 1000


def test_none_is_enough() -> None:
    with pytest.raises(ConfigError, match="5 replicas are not enough"):
        smallest(lambda number: False, most=5)
