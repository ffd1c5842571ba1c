from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.adapters.loader import LoadResult
from lora_serve.adapters.manager import AdapterEvents, AdapterManager
from lora_serve.errors import (
    AdapterChangedError,
    AdapterError,
    AdapterExistsError,
    AdapterFormatError,
    AdapterNotFoundError,
    AdapterUnavailableError,
    LoraServeError,
    RankLostError,
)
from lora_serve.identity import AdapterRef
from lora_serve.messages import LoadAdapter
from tests.fakes.adapter_world import room_for
from tests.fakes.checkpoints import checkpoint_of
from tests.fakes.manual_loader import ManualLoader

A, B, C = (checkpoint_of(content) for content in "ABC")


@pytest.fixture
def loader() -> ManualLoader:
    return ManualLoader()


@pytest.fixture
def manager(loader: ManualLoader) -> Iterator[AdapterManager]:
    """Room for two."""
    manager = AdapterManager(room_for(2), loader, clock=lambda: 1.0)
    yield manager
    manager.check_invariants()


def publish(
    manager: AdapterManager, name: str, content: str, *, pinned: bool = False
) -> AdapterRef:
    ref = manager.publish(name, checkpoint_of(content), load_inplace=True, pinned=pinned)
    manager.check_invariants()
    return ref


def reload(
    manager: AdapterManager,
    loader: ManualLoader,
    ref: AdapterRef,
    outcome: AdapterCheckpoint | LoraServeError,
) -> AdapterEvents:
    """Have a version read again, which comes to `outcome`."""
    manager.request_load(ref)
    assert manager.is_loading
    loader.finish(ref, outcome)
    events = manager.take_events()
    assert not manager.is_loading
    manager.check_invariants()
    return events


def residency(manager: AdapterManager) -> dict[str, str]:
    return {info.name: info.residency for info in manager.infos()}


def test_an_adapter_that_a_rank_does_not_take_in_time_ends_the_engine(
    manager: AdapterManager, loader: ManualLoader
) -> None:
    first = publish(manager, "a", "A")
    publish(manager, "b", "B")
    publish(manager, "c", "C")
    manager.request_load(first)
    loader.finish(first, RankLostError("rank 1 hangs"))
    with pytest.raises(RankLostError, match="rank 1 hangs"):
        manager.take_events()


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


def test_more_pinned_adapters_than_fit_all_stay(manager: AdapterManager) -> None:
    for content in "ABCD":
        publish(manager, content, content, pinned=True)
    assert set(residency(manager).values()) == {"resident"}


def test_an_evicted_adapter_is_read_again_and_kept_for_its_request(
    manager: AdapterManager, loader: ManualLoader
) -> None:
    for content in "ABC":
        publish(manager, content, content)
    ref = manager.acquire("A")
    assert not manager.is_resident(ref)
    assert reload(manager, loader, ref, A).back == [ref]
    publish(manager, "D", "D")
    publish(manager, "E", "E")
    assert manager.is_resident(ref)
    manager.on_running(ref)
    manager.on_idle(ref)
    manager.release(ref)


def test_a_load_that_fails_changes_nothing(manager: AdapterManager, loader: ManualLoader) -> None:
    for content in "ABC":
        publish(manager, content, content)
    before = residency(manager)
    ref = manager.acquire("A")
    ((lost, error),) = reload(manager, loader, ref, AdapterError("the disk is gone")).lost
    assert lost == ref
    assert isinstance(error, AdapterChangedError)
    assert residency(manager) == before
    assert reload(manager, loader, ref, A).back == [ref], "it may be tried again"
    manager.release(ref)


def test_tensors_that_are_ignored_are_told_in_the_log_once(
    manager: AdapterManager, loader: ManualLoader, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = replace(A, ignored=("k_proj.lora_A.weight", "k_proj.lora_B.weight"))
    manager.start_load(LoadAdapter(1, "n", "/adapters/one"))
    loader.end(LoadResult(loader.jobs.pop(), checkpoint))
    manager.take_events()
    (line,) = caplog.messages
    assert line.startswith("lora adapter 'n' (/adapters/one): 2 tensors are ignored, as PEFT ignor")
    assert "'k_proj.lora_A.weight'" in line
    ref = manager.acquire("n")
    publish(manager, "B", "B")
    publish(manager, "C", "C")
    reload(manager, loader, ref, checkpoint)
    assert caplog.messages == [line]
    manager.release(ref)


def test_a_version_that_cannot_be_read_is_back_if_its_bytes_came_by_another_load(
    manager: AdapterManager, loader: ManualLoader
) -> None:
    for content in "ABC":
        publish(manager, content, content)
    ref = manager.acquire("A")
    manager.request_load(ref)
    publish(manager, "other name", "A")
    loader.finish(ref, AdapterNotFoundError("no files"))
    assert manager.take_events().back == [ref]
    manager.release(ref)


def test_weights_that_were_read_for_a_request_that_left_arrive_and_go(
    manager: AdapterManager, loader: ManualLoader
) -> None:
    for content in "ABC":
        publish(manager, content, content)
        manager.take_changes()
    ref = manager.acquire("A")
    manager.request_load(ref)
    manager.unload("A")
    manager.release(ref)
    loader.finish(ref, A)
    manager.take_events()
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
    assert manager.take_changes() == ((), (B.digest,))
    assert manager.take_changes() == ((B.digest,), ())
    with pytest.raises(AdapterExistsError):
        manager.publish("n", A, load_inplace=False)
    assert manager.take_changes() == ((), (A.digest,))
    assert manager.is_resident(ref)


class Watched(AdapterCheckpoint):
    """A checkpoint that can be watched."""


def test_the_error_of_a_load_that_came_second_keeps_none_of_its_tensors_alive(
    manager: AdapterManager, loader: ManualLoader
) -> None:
    manager.start_load(LoadAdapter(1, "n", "/adapters/one"))
    publish(manager, "n", "A")
    checkpoint = Watched(**{each.name: getattr(B, each.name) for each in fields(B)})
    watched = weakref.ref(checkpoint)
    loader.end(LoadResult(loader.jobs.pop(), checkpoint))
    del checkpoint
    ((_, error),) = manager.take_events().published
    assert isinstance(error, AdapterExistsError)
    assert watched() is None


def test_files_that_changed_since_the_load_are_refused(
    manager: AdapterManager, loader: ManualLoader, caplog: pytest.LogCaptureFixture
) -> None:
    ref = publish(manager, "n", "A")
    publish(manager, "B", "B")
    publish(manager, "C", "C")  # evicts n
    ((lost, error),) = reload(manager, loader, ref, B).lost
    assert lost == ref
    assert isinstance(error, AdapterChangedError)
    assert str(error) == (
        "The files of lora adapter 'n' have changed since it was loaded "
        f"(digest {A.digest.hex()[:12]}, now {B.digest.hex()[:12]}); restore them, or load it "
        "again with load_inplace; the server's log names them"
    )
    assert "/adapters/one" in caplog.text


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (AdapterNotFoundError("No adapter found for /adapters/one"), AdapterChangedError),
        (AdapterFormatError("/adapters/one", ["no tensors"]), AdapterChangedError),
        (AdapterError("/adapters/one lies outside of /elsewhere"), AdapterChangedError),
        (AdapterUnavailableError("/adapters/one was not read"), AdapterUnavailableError),
    ],
)
def test_where_an_evicted_adapter_lay_is_for_the_log_alone(
    manager: AdapterManager,
    loader: ManualLoader,
    caplog: pytest.LogCaptureFixture,
    fault: LoraServeError,
    told: type[LoraServeError],
) -> None:
    ref = publish(manager, "n", "A")
    publish(manager, "B", "B")
    publish(manager, "C", "C")  # evicts n
    ((_, error),) = reload(manager, loader, ref, fault).lost
    assert type(error) is told
    assert "'n'" in str(error)
    assert "/" not in str(error)
    assert str(fault) in caplog.text


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
    assert manager.info(ref).path == "/adapters/one"
    manager.release(ref)


def test_names_are_checked_before_anything_is_read(manager: AdapterManager) -> None:
    publish(manager, "n", "A")
    with pytest.raises(AdapterExistsError):
        manager.start_load(LoadAdapter(1, "n", "/adapters/one"))
    assert not manager.is_loading
    with pytest.raises(AdapterNotFoundError):
        manager.acquire("m")
    with pytest.raises(AdapterNotFoundError):
        manager.unload("m")
    with pytest.raises(AdapterNotFoundError):
        manager.invalidate("m")
