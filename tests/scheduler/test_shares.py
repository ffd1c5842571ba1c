from __future__ import annotations

from lora_serve.scheduler.shares import MIN_SWEEP, FairShares


def test_a_newcomer_begins_where_a_fair_part_would_stand() -> None:
    shares = FairShares()
    shares.arrive("a")
    shares.arrive("b")
    shares.charge("a", 60)
    shares.charge("b", 40)
    shares.arrive("c")
    assert (shares.served("a"), shares.served("b"), shares.served("c")) == (60, 40, 50)


def test_idleness_saves_up_nothing() -> None:
    shares = FairShares()
    for share in ("idle", "busy"):
        shares.arrive(share)
    shares.stop_waiting("idle")
    shares.charge("busy", 1000)
    shares.arrive("idle")
    assert shares.served("idle") == shares.served("busy") == 1000


def test_what_was_used_while_no_other_share_wanted_it_is_not_held_against_a_share() -> None:
    shares = FairShares()
    shares.arrive("alone")
    shares.charge("alone", 10**6)
    shares.arrive("new")
    assert shares.served("alone") == shares.served("new")


def test_a_share_that_waits_keeps_what_it_has_missed() -> None:
    shares = FairShares()
    for share in ("waits", "served"):
        shares.arrive(share)
    shares.charge("served", 500)
    shares.arrive("waits")  # one more request of it
    assert shares.served("waits") == 0


def test_shares_of_the_past_are_forgotten() -> None:
    shares = FairShares()
    for number in range(10 * MIN_SWEEP):
        name = f"tenant {number}"
        shares.arrive(name)
        shares.stop_waiting(name)
        shares.charge(name, 10)
    assert len(shares._served) < 3 * MIN_SWEEP
