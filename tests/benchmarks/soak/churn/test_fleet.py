from __future__ import annotations

from pathlib import Path

from benchmarks.soak.churn.fleet import Fleet
from benchmarks.soak.churn.names import name_costs


def test_renewed_members_have_other_bytes_and_both_may_answer_until_they_are_loaded(
    tmp_path: Path,
) -> None:
    fleet = Fleet(tmp_path, num_members=2, num_versions=3)
    first, second = fleet.members
    first.note_loaded()
    before = first.digest
    fleet.renew(first)
    assert len({before, first.digest, second.digest}) == 3
    assert first.live == {before, first.digest}
    assert first.is_changing
    first.note_loaded()
    assert first.live == {first.digest}
    assert not first.is_changing


def test_a_member_that_is_removed_leaves_no_files(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, num_members=1, num_versions=1)
    (member,) = fleet.members
    assert (member.path / "adapter_model.safetensors").is_file()
    fleet.remove(member)
    assert not member.path.exists()


def test_the_cost_of_a_name_is_told_for_so_many_names() -> None:
    costs = name_costs(10)
    assert costs.num_names == 10
    assert costs.lookup_us > 0
    assert costs.publish_us > 0
