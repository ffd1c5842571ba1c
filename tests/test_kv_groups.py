from __future__ import annotations

import pytest

from lora_serve.kv_groups import KVGroup, KVNeeds, tokens_in_flight

FULL = KVGroup()


@pytest.mark.parametrize("window", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("in_flight", [1, 2, 3, 8])
def test_a_window_is_given_the_most_blocks_that_tokens_in_flight_lie_in_and_see(
    window: int, in_flight: int
) -> None:
    """Counted block by block, wherever the tokens begin."""
    block_size, group = 4, KVGroup(window)
    most = 0
    for start in range(40):
        seen = range(max(0, start - window + 1), start + in_flight)
        blocks = {position // block_size for position in seen}
        most = max(most, len(blocks))
        assert group.first_seen(start, block_size) == min(blocks)
    assert KVNeeds((group,), block_size, in_flight).most_seen(group) == most


def test_a_full_group_needs_all_blocks_and_a_window_no_more_than_it_sees() -> None:
    needs = KVNeeds((FULL, KVGroup(20), KVGroup(20)), block_size=16, in_flight=10)
    assert needs.most_seen(KVGroup(20)) == 3
    assert needs.blocks_of_request(16) == 3
    assert needs.blocks_of_request(160) == 10 + 2 * 3


def test_the_longest_request_is_what_the_pool_holds_of_all_groups() -> None:
    assert KVNeeds((FULL,), 16).longest_request(10, 1000) == 160
    assert KVNeeds((FULL,), 16).longest_request(10, 100) == 100
    assert KVNeeds((FULL, KVGroup(20)), 16).longest_request(10, 1000) == 16 * 7
    assert KVNeeds((KVGroup(20),), 16).longest_request(3, 1000) == 1000
    assert KVNeeds((KVGroup(20),), 16).longest_request(2, 1000) == 32


def fitted(groups: tuple[KVGroup, ...], num_blocks: int) -> int:
    return tokens_in_flight(
        groups, 16, num_blocks=num_blocks, max_model_len=1000, wanted=500, least=2
    )


def test_a_pool_with_room_lets_whole_steps_fly() -> None:
    assert fitted((KVGroup(20),), 100) == 500
    assert fitted((FULL,), 1) == 500  # all blocks of a prompt are taken at once anyway


def test_a_small_pool_lets_as_much_fly_as_leaves_room_for_the_longest_request() -> None:
    for num_blocks in range(3, 40):
        in_flight = fitted((KVGroup(20),), num_blocks)
        assert KVNeeds((KVGroup(20),), 16, in_flight).longest_request(num_blocks, 1000) == 1000
        more = KVNeeds((KVGroup(20),), 16, in_flight + 1)
        assert in_flight == 500 or more.longest_request(num_blocks, 1000) < 1000


def test_a_pool_too_small_for_the_longest_request_holds_the_longest_that_it_can() -> None:
    for groups in ((KVGroup(20),), (FULL, KVGroup(20))):
        for num_blocks in range(2, 40):
            longest = KVNeeds(groups, 16, 2).longest_request(num_blocks, 1000)
            needs = KVNeeds(groups, 16, fitted(groups, num_blocks))
            assert needs.longest_request(num_blocks, 1000) == longest
