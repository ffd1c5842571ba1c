from __future__ import annotations

from lora_serve.speculation.pace import DraftPace


def test_a_request_one_of_whose_drafts_was_right_drafts_as_much_as_it_may() -> None:
    """How many of these are worth their rows hangs on how likely they are right."""
    pace = DraftPace(8)
    pace.verified(8, 0, 10)
    assert pace.num_wanted(10) == 4
    pace.verified(4, 1, 12)
    assert pace.num_wanted(12) == 8
    acceptances = []
    for _ in range(3):
        pace.verified(8, 1, 14)
        acceptances.append(pace.acceptance)
    assert acceptances == sorted(acceptances, reverse=True)
    pace.verified(8, 8, 22)
    assert pace.acceptance > 0.9


def test_a_request_whose_drafts_are_wrong_hardly_drafts() -> None:
    pace = DraftPace(8)
    num_drafts = 0
    for num_output_tokens in range(10_000):
        if wanted := pace.num_wanted(num_output_tokens):
            pace.verified(wanted, 0, num_output_tokens)
            num_drafts += wanted
    assert num_drafts < 110


def test_each_rest_is_twice_as_long_and_a_right_draft_ends_them() -> None:
    pace = DraftPace(8)
    for num_skipped in (0, 1, 3, 7, 15):
        pace.verified(1, 0, 100)
        assert pace.num_wanted(100 + num_skipped) >= 1
        assert not num_skipped or not pace.num_wanted(99 + num_skipped)
    pace.verified(1, 1, 133)
    assert pace.num_wanted(133) == 8
    pace.verified(2, 0, 134)
    assert pace.num_wanted(134) == 4
