from __future__ import annotations

from lora_serve.scheduler.shares import MIN_SWEEP, FairShares


def waiting(*names: str) -> FairShares:
    """Shares with two waiting requests each."""
    shares = FairShares()
    for name in names:
        shares.wait(name)
        shares.wait(name)
    return shares


def let_in(shares: FairShares, share: str, num_tokens: int) -> None:
    """Let a request in, and compute so many tokens for it."""
    shares.take_turn(share)
    shares.stop_waiting(share)
    shares.charge(share, num_tokens)


def test_a_newcomer_begins_where_the_share_was_that_was_let_in_last() -> None:
    shares = waiting("a", "b")
    let_in(shares, "a", 60)
    let_in(shares, "b", 40)
    shares.wait("c")
    assert (shares.served("a"), shares.served("b"), shares.served("c")) == (60, 40, 0)
    let_in(shares, "c", 50)
    shares.wait("c")
    let_in(shares, "b", 40)
    shares.wait("d")
    assert shares.served("d") == 40


def test_idleness_saves_up_nothing() -> None:
    shares = waiting("idle", "busy")
    shares.stop_waiting("idle", 2)
    shares.charge("busy", 1000)
    shares.wait("idle")
    assert shares.served("idle") == shares.served("busy") == 1000


def test_a_share_that_runs_little_saves_up_nothing_until_it_wants_more() -> None:
    shares = waiting("little", "x", "y")
    let_in(shares, "little", 10)
    let_in(shares, "little", 10)
    for _ in range(50):
        for share in ("x", "y"):
            let_in(shares, share, 100)
            shares.wait(share)
        shares.charge("little", 1)
    shares.wait("little")
    assert shares.served("little") == 4900, "as the others when they were let in last"


def test_what_was_used_while_no_other_share_wanted_it_is_not_held_against_a_share() -> None:
    shares = waiting("alone")
    shares.charge("alone", 10**6)
    shares.wait("new")
    assert shares.served("alone") == shares.served("new")


def test_shares_that_run_where_none_waits_stand_alike_to_a_newcomer() -> None:
    shares = waiting("much", "little")
    for share in ("much", "little"):
        shares.stop_waiting(share, 2)
    for _ in range(1000):
        shares.charge("much", 3)
        shares.charge("little", 1)
    shares.wait("new")
    assert [shares.served(share) for share in ("much", "little", "new")] == [3000] * 3


def test_what_was_used_before_others_is_held_against_a_share_that_goes_on_alone() -> None:
    shares = waiting("greedy", "other")
    shares.charge("greedy", 500)
    shares.stop_waiting("other", 2)
    shares.charge("greedy", 0)
    shares.wait("other")
    assert (shares.served("greedy"), shares.served("other")) == (500, 0)


def test_the_common_time_stands_still_while_a_share_runs_below_it_alone() -> None:
    shares = waiting("owed", "ahead")
    shares.charge("ahead", 500)
    shares.take_turn("ahead")  # which passes one that cannot be let in yet
    shares.stop_waiting("ahead", 2)
    shares.charge("owed", 300)
    shares.wait("new")
    assert (shares.served("owed"), shares.served("new")) == (300, 500)


def test_a_share_that_waits_keeps_what_it_has_missed() -> None:
    shares = waiting("waits", "served")
    shares.charge("served", 500)
    shares.wait("waits")  # one more request of it
    assert shares.served("waits") == 0


def test_a_share_that_was_put_off_when_its_turn_came_goes_before_all_that_wait() -> None:
    """Its only request is deferred, or fetches, while others are let in."""
    shares = waiting("put off", "x", "y")
    shares.stop_waiting("put off", 2)
    for _ in range(10):
        for share in ("x", "y"):
            let_in(shares, share, 100)
            shares.wait(share)
    shares.wait("put off")
    assert shares.served("put off") <= min(shares.served("x"), shares.served("y"))


def test_shares_of_the_past_are_forgotten() -> None:
    shares = FairShares()
    for number in range(10 * MIN_SWEEP):
        name = f"tenant {number}"
        shares.wait(name)
        shares.stop_waiting(name)
        shares.charge(name, 10)
    assert len(shares._served) < 3 * MIN_SWEEP
