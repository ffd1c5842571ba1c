from __future__ import annotations

from lora_serve.speculation.pace import DraftPace


def test_a_request_whose_drafts_are_right_drafts_as_much_as_it_may() -> None:
    pace = DraftPace(8)
    pace.verified(4, 1, 10)
    assert pace.num_wanted(10) == 2
    for num_drafts in (2, 4):
        assert pace.num_wanted(10) == num_drafts
        pace.verified(num_drafts, num_drafts, 10)
    assert pace.num_wanted(10) == 8


def test_a_request_whose_drafts_are_wrong_hardly_drafts() -> None:
    pace = DraftPace(8)
    num_drafts = 0
    for num_output_tokens in range(10_000):
        if wanted := pace.num_wanted(num_output_tokens):
            pace.verified(wanted, 0, num_output_tokens)
            num_drafts += wanted
    assert num_drafts < 110


def test_a_right_draft_ends_the_rests() -> None:
    pace = DraftPace(8)
    for _ in range(5):
        pace.verified(1, 0, 100)
    assert not pace.num_wanted(131)
    assert pace.num_wanted(132) == 1
    pace.verified(1, 1, 133)
    assert pace.num_wanted(133) == 2
    pace.verified(2, 0, 134)
    assert pace.num_wanted(136) == 1
