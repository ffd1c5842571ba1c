from __future__ import annotations

from collections.abc import Iterator

import pytest

from lora_serve.adapters.manager import AdapterManager
from lora_serve.errors import AdapterChangedError, AdapterExistsError, AdapterNotFoundError
from lora_serve.identity import AdapterRef
from tests.fakes.checkpoints import checkpoint_of

A, B, C = (checkpoint_of(content) for content in "ABC")


@pytest.fixture
def manager() -> Iterator[AdapterManager]:
    """Room for two."""
    manager = AdapterManager(2, clock=lambda: 1.0)
    yield manager
    manager.check_invariants()


def publish(
    manager: AdapterManager, name: str, content: str, *, pinned: bool = False
) -> AdapterRef:
    ref = manager.publish(name, checkpoint_of(content), load_inplace=True, pinned=pinned)
    manager.check_invariants()
    return ref


def reload(manager: AdapterManager, ref: AdapterRef) -> None:
    manager.begin_load(ref)
    manager.finish_load(ref)
    manager.check_invariants()


def residency(manager: AdapterManager) -> dict[str, str]:
    return {info.name: info.residency for info in manager.infos()}


def test_a_published_adapter_is_resident_and_added_by_the_next_step(
    manager: AdapterManager,
) -> None:
    ref = publish(manager, "n", "A")
    assert manager.is_resident(ref)
    assert manager.take_changes() == ((), (A.digest,))
    assert manager.info(ref).residency == "resident"
    assert manager.num_loads == 1


def test_a_replaced_version_leaves_memory_with_its_last_lease(manager: AdapterManager) -> None:
    publish(manager, "n", "A")
    old = manager.acquire("n")
    manager.take_changes()
    publish(manager, "n", "B")
    assert manager.is_resident(old)
    assert manager.take_changes() == ((), (B.digest,))
    manager.release(old)
    assert not manager.is_resident(old)
    assert manager.take_changes() == ((A.digest,), ())


def test_a_replaced_version_without_leases_makes_room_for_the_new_one(
    manager: AdapterManager,
) -> None:
    publish(manager, "n", "A")
    publish(manager, "other", "C")
    publish(manager, "n", "B")
    assert residency(manager) == {"n": "resident", "other": "resident"}
    assert manager.num_evictions == 0


def test_a_superseded_version_with_a_lease_is_never_evicted(manager: AdapterManager) -> None:
    publish(manager, "n", "A")
    old = manager.acquire("n")
    publish(manager, "n", "B")
    publish(manager, "more", "C")
    publish(manager, "yet more", "D")
    assert manager.is_resident(old)
    assert residency(manager) == {"n": "evicted", "more": "evicted", "yet more": "resident"}


def test_unloaded_weights_stay_while_another_name_has_the_same_bytes(
    manager: AdapterManager,
) -> None:
    publish(manager, "one", "A")
    two = publish(manager, "two", "A")
    manager.unload("one")
    assert manager.is_resident(two)
    manager.unload("two")
    assert not manager.is_resident(two)


def test_unloaded_weights_stay_while_a_request_runs_on_them(manager: AdapterManager) -> None:
    publish(manager, "n", "A")
    ref = manager.acquire("n")
    manager.on_running(ref)
    manager.unload("n")
    manager.check_invariants()
    assert manager.is_resident(ref)
    manager.on_idle(ref)
    manager.release(ref)
    assert not manager.is_resident(ref)


def test_a_pinned_adapter_is_never_evicted(manager: AdapterManager) -> None:
    publish(manager, "pinned", "A", pinned=True)
    for content in "BCD":
        publish(manager, content, content)
    assert residency(manager)["pinned"] == "resident"
    publish(manager, "pinned", "A", pinned=False)
    publish(manager, "E", "E")
    publish(manager, "F", "F")
    assert residency(manager)["pinned"] == "evicted"


def test_more_pinned_adapters_than_fit_are_counted(manager: AdapterManager) -> None:
    for content in "ABCD":
        publish(manager, content, content, pinned=True)
    assert manager.num_over_bound == 2
    assert set(residency(manager).values()) == {"resident"}


def test_an_evicted_adapter_is_read_again_and_kept_for_its_request(
    manager: AdapterManager,
) -> None:
    for content in "ABC":
        publish(manager, content, content)
    ref = manager.acquire("A")
    assert not manager.is_resident(ref)
    reload(manager, ref)
    publish(manager, "D", "D")
    publish(manager, "E", "E")
    assert manager.is_resident(ref)
    manager.on_running(ref)
    manager.on_idle(ref)
    manager.release(ref)


def test_a_load_that_fails_changes_nothing(manager: AdapterManager) -> None:
    for content in "ABC":
        publish(manager, content, content)
    before = residency(manager)
    ref = manager.acquire("A")
    manager.begin_load(ref)
    manager.fail_load(ref)
    manager.release(ref)
    assert residency(manager) == before
    manager.begin_load(ref)  # and may be tried again
    manager.fail_load(ref)


def test_a_version_is_read_only_once_at_a_time(manager: AdapterManager) -> None:
    ref = publish(manager, "n", "A")
    manager.begin_load(ref)
    with pytest.raises(AssertionError, match="n is being read already"):
        manager.begin_load(ref)


def test_weights_that_were_read_for_nobody_arrive_and_go(manager: AdapterManager) -> None:
    for content in "ABC":
        publish(manager, content, content)
        manager.take_changes()
    ref = manager.acquire("A")
    manager.begin_load(ref)
    manager.unload("A")
    manager.release(ref)
    manager.finish_load(ref)
    assert not manager.is_resident(ref)
    assert manager.take_changes() == ((), (A.digest,))
    assert manager.take_changes() == ((A.digest,), ())


def test_weights_that_were_prepared_and_not_published_arrive_and_go(
    manager: AdapterManager,
) -> None:
    ref = publish(manager, "n", "A")
    manager.take_changes()
    with pytest.raises(AdapterExistsError):
        manager.publish("n", B, load_inplace=False)
    manager.discard_prepared(B.digest)
    assert manager.take_changes() == ((), (B.digest,))
    assert manager.take_changes() == ((B.digest,), ())
    manager.discard_prepared(A.digest)
    assert manager.take_changes() == ((), (A.digest,))
    assert manager.is_resident(ref)


def test_files_that_changed_since_the_load_are_refused(manager: AdapterManager) -> None:
    ref = publish(manager, "n", "A")
    manager.verify_reload(ref, A)
    with pytest.raises(AdapterChangedError) as error:
        manager.verify_reload(ref, B)
    assert str(error.value) == (
        "The files of lora adapter 'n' at /adapters/one have changed since it was loaded "
        f"(digest {A.digest.hex()[:12]}, now {B.digest.hex()[:12]}); load it again with "
        "load_inplace, or restore them"
    )


def test_invalidation_keeps_the_weights(manager: AdapterManager) -> None:
    publish(manager, "n", "A")
    leased = manager.acquire("n")
    manager.take_changes()
    old, new = manager.invalidate("n")
    manager.check_invariants()
    assert old == leased
    assert (old.digest, old.generation + 1) == (new.digest, new.generation)
    assert manager.take_changes() == ((), ())
    manager.release(leased)
    assert manager.is_resident(new)


def test_a_version_can_be_looked_up_while_it_is_leased(manager: AdapterManager) -> None:
    publish(manager, "n", "A")
    ref = manager.acquire("n")
    manager.unload("n")
    assert manager.version(ref).path == "/adapters/one"
    manager.release(ref)


def test_names_are_checked_before_anything_is_read(manager: AdapterManager) -> None:
    publish(manager, "n", "A")
    with pytest.raises(AdapterExistsError):
        manager.check_name_free("n", load_inplace=False)
    with pytest.raises(AdapterNotFoundError):
        manager.acquire("m")
    with pytest.raises(AdapterNotFoundError):
        manager.unload("m")
    with pytest.raises(AdapterNotFoundError):
        manager.invalidate("m")
