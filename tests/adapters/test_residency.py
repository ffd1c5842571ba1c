from __future__ import annotations

from collections.abc import Iterator

import pytest

from lora_serve.adapters.residency import AdapterResidency, Claim

A, B, C, D = (letter * 32 for letter in (b"a", b"b", b"c", b"d"))


@pytest.fixture
def memory() -> Iterator[AdapterResidency]:
    """Room for two."""
    memory = AdapterResidency(2)
    yield memory
    memory.check_invariants()


def resident(memory: AdapterResidency) -> set[bytes]:
    memory.check_invariants()
    return {digest for digest, _ in memory.claims()}


def test_what_was_added_is_resident_and_told_to_the_workers_once(memory: AdapterResidency) -> None:
    memory.add(A, Claim.IDLE)
    assert memory.is_resident(A)
    assert not memory.is_resident(B)
    assert memory.take_changes() == ((), (A,))
    assert memory.take_changes() == ((), ())
    assert (memory.num_loads, memory.num_evictions, resident(memory)) == (1, 0, {A})


def test_the_least_recently_used_idle_adapter_goes_first(memory: AdapterResidency) -> None:
    memory.add(A, Claim.IDLE)
    memory.add(B, Claim.IDLE)
    memory.settle(A, Claim.LEASED)
    memory.settle(A, Claim.IDLE)  # A was used after B
    memory.take_changes()
    memory.add(C, Claim.IDLE)
    assert resident(memory) == {A, C}
    assert memory.take_changes() == ((B,), (C,))
    assert memory.num_evictions == 1


def test_an_idle_adapter_goes_before_one_that_requests_wait_for(memory: AdapterResidency) -> None:
    memory.add(A, Claim.LEASED)
    memory.add(B, Claim.IDLE)
    memory.settle(B, Claim.IDLE)
    memory.add(C, Claim.LEASED)
    assert resident(memory) == {A, C}


def test_one_that_requests_wait_for_goes_when_nothing_else_can(memory: AdapterResidency) -> None:
    memory.add(A, Claim.LEASED)
    memory.add(B, Claim.LEASED)
    memory.add(C, Claim.PROTECTED)
    assert resident(memory) == {B, C}


def test_an_adapter_with_running_requests_is_never_evicted(memory: AdapterResidency) -> None:
    for digest in (A, B):
        memory.add(digest, Claim.LEASED)
        memory.on_running(digest)
    memory.on_running(A)
    memory.add(C, Claim.LEASED, is_awaited=True)
    memory.on_running(C)
    assert resident(memory) == {A, B, C}
    memory.on_idle(A)
    assert resident(memory) == {A, B, C}
    memory.on_idle(A)  # the bound holds again as soon as it can
    assert resident(memory) == {B, C}


def test_a_protected_adapter_is_never_evicted(memory: AdapterResidency) -> None:
    for digest in (A, B, C, D):
        memory.add(digest, Claim.PROTECTED)
    assert resident(memory) == {A, B, C, D}
    memory.settle(B, Claim.IDLE)
    memory.settle(C, Claim.LEASED)
    assert resident(memory) == {A, D}


def test_an_idle_newcomer_that_finds_no_room_does_not_exceed_the_bound(
    memory: AdapterResidency,
) -> None:
    memory.add(A, Claim.PROTECTED)
    memory.add(B, Claim.PROTECTED)
    memory.add(C, Claim.IDLE)
    assert resident(memory) == {A, B}
    assert memory.take_changes() == ((), (A, B, C))  # prepared, so it has to arrive
    assert memory.take_changes() == ((C,), ())


def test_what_was_read_back_for_a_request_stays_until_it_runs(memory: AdapterResidency) -> None:
    memory.add(A, Claim.LEASED, is_awaited=True)
    memory.add(B, Claim.LEASED, is_awaited=True)
    memory.add(C, Claim.LEASED)
    assert resident(memory) == {A, B}
    memory.on_running(A)
    memory.on_idle(A)  # has run: its turn is over
    memory.add(C, Claim.LEASED)
    assert resident(memory) == {B, C}


def test_what_was_read_back_is_not_kept_for_requests_that_left(memory: AdapterResidency) -> None:
    memory.add(A, Claim.LEASED, is_awaited=True)
    memory.settle(A, Claim.IDLE)
    memory.settle(A, Claim.LEASED)  # another request, which did not ask for it to be read
    memory.add(B, Claim.LEASED)
    memory.add(C, Claim.LEASED)
    assert resident(memory) == {B, C}


def test_what_no_request_can_ask_for_is_dropped_at_once(memory: AdapterResidency) -> None:
    memory.add(A, Claim.IDLE)
    memory.take_changes()
    memory.settle(A, Claim.NONE)
    assert resident(memory) == set()
    assert memory.take_changes() == ((A,), ())
    assert memory.num_evictions == 0


def test_what_runs_is_not_dropped_before_it_ended(memory: AdapterResidency) -> None:
    memory.add(A, Claim.LEASED)
    memory.on_running(A)
    memory.settle(A, Claim.NONE)
    assert resident(memory) == {A}
    memory.on_idle(A)
    assert resident(memory) == set()


def test_what_is_not_resident_cannot_be_settled_or_run(memory: AdapterResidency) -> None:
    memory.settle(A, Claim.LEASED)
    assert resident(memory) == set()
    with pytest.raises(AssertionError, match="a request runs without its weights"):
        memory.on_running(A)


def test_more_ends_than_starts_are_a_bug() -> None:
    memory = AdapterResidency(2)
    memory.add(A, Claim.LEASED)
    with pytest.raises(AssertionError, match="more requests ended than ran"):
        memory.on_idle(A)


# ── what the workers are sent ───────────────────────────────────────────────────────────────


def test_dropped_and_added_in_one_go_is_dropped_first(memory: AdapterResidency) -> None:
    memory.add(A, Claim.IDLE)
    memory.take_changes()
    memory.settle(A, Claim.NONE)
    memory.add(A, Claim.IDLE)
    assert memory.take_changes() == ((A,), (A,))
    assert memory.take_changes() == ((), ())


def test_added_and_dropped_in_one_go_arrives_and_goes(memory: AdapterResidency) -> None:
    memory.add(A, Claim.IDLE)
    memory.settle(A, Claim.NONE)
    assert memory.take_changes() == ((), (A,))
    assert memory.take_changes() == ((A,), ())
    assert memory.take_changes() == ((), ())


def test_an_unwanted_copy_of_what_is_resident_is_taken_and_stays(memory: AdapterResidency) -> None:
    memory.add(A, Claim.IDLE)
    memory.take_changes()
    memory.add(A, Claim.IDLE)
    assert memory.take_changes() == ((), (A,))
    assert memory.take_changes() == ((), ())


def test_each_preparation_is_taken_once(memory: AdapterResidency) -> None:
    memory.add(A, Claim.IDLE)
    memory.add(A, Claim.IDLE)
    assert memory.take_changes() == ((), (A, A))


def test_a_digest_is_dropped_only_once_a_step(memory: AdapterResidency) -> None:
    memory.add(A, Claim.IDLE)
    memory.take_changes()
    for _ in range(2):
        memory.settle(A, Claim.NONE)
        memory.add(A, Claim.IDLE)
    memory.settle(A, Claim.NONE)
    assert memory.take_changes() == ((A,), (A, A))
    assert memory.take_changes() == ((A,), ())


def test_what_comes_back_before_it_could_go_stays(memory: AdapterResidency) -> None:
    memory.add(A, Claim.IDLE)
    memory.settle(A, Claim.NONE)
    memory.take_changes()  # A is to be dropped next
    memory.add(A, Claim.IDLE)
    assert memory.take_changes() == ((A,), (A,))
    assert memory.take_changes() == ((), ())
