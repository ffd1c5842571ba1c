"""Kernels must not be measured on weights that a cache still holds."""

from benchmarks.speed.kernels.measure import BEYOND_CACHES, in_turns, num_copies


def test_calls_take_turns_and_begin_again() -> None:
    made: list[str] = []
    call = in_turns([lambda: made.append("first"), lambda: made.append("second")])
    for _ in range(3):
        call()
    assert made == ["first", "second", "first"]


def test_copies_together_are_beyond_every_cache() -> None:
    for num_bytes in (1, 1000, BEYOND_CACHES - 1, BEYOND_CACHES):
        copies = num_copies(num_bytes)
        assert copies * num_bytes >= BEYOND_CACHES > (copies - 1) * num_bytes


def test_a_large_weight_is_not_copied() -> None:
    assert num_copies(3 * BEYOND_CACHES) == 1
