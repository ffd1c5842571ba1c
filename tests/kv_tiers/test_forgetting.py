from __future__ import annotations

from lora_serve.kv_tiers.forgetting import NOT_YET, Forgetting


def test_it_is_settled_when_every_tier_has_spoken_and_done_when_every_tier_has_forgotten() -> None:
    notices: list[str] = []
    forgetting = Forgetting(("ram", "disk"), lambda: notices.append("settled"))
    assert forgetting.obstacles == {"ram": NOT_YET, "disk": NOT_YET}
    forgetting.confirm("ram")
    assert not forgetting.is_settled
    forgetting.failed("disk", "it is full")
    forgetting.failed("disk", "it is read-only")
    assert forgetting.is_settled
    assert forgetting.obstacles == {"disk": "it is read-only"}
    forgetting.confirm("disk")
    assert forgetting.obstacles == {}
    assert notices == ["settled"]


def test_without_tiers_there_is_nothing_to_wait_for() -> None:
    assert Forgetting().is_settled
    assert not Forgetting().obstacles
