from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.adapters.registry import AdapterRegistry, DigestUse
from lora_serve.errors import AdapterExistsError, AdapterNotFoundError
from lora_serve.identity import AdapterRef
from lora_serve.messages import AdapterInfo
from tests.fakes.checkpoints import checkpoint_of, whole_checkpoint

A, B = checkpoint_of("A"), checkpoint_of("B")


@pytest.fixture
def registry() -> Iterator[AdapterRegistry]:
    registry = AdapterRegistry(clock=iter(range(1000)).__next__)
    yield registry
    registry.check_invariants()


def publish(
    registry: AdapterRegistry, name: str, checkpoint: AdapterCheckpoint, *, pinned: bool = False
) -> AdapterRef:
    ref = registry.publish(name, checkpoint, load_inplace=True, pinned=pinned)
    registry.check_invariants()
    return ref


def info(registry: AdapterRegistry, ref: AdapterRef) -> AdapterInfo:
    return registry.info(ref, is_resident=False)


def test_a_published_name_can_be_acquired(registry: AdapterRegistry) -> None:
    published = publish(registry, "n", A)
    assert registry.acquire("n") == published == AdapterRef("n", A.digest, 0)
    assert registry.get("n") == published


def test_a_version_tells_what_was_published(registry: AdapterRegistry) -> None:
    ref = publish(registry, "n", A)
    registry.acquire("n")
    version = info(registry, ref)
    assert (version.path, version.rank, version.num_bytes) == ("/adapters/one", 8, 100)
    assert (version.base_model, version.num_leases, version.created) == ("base", 1, 0)
    assert registry.get("n") == ref
    assert not version.pinned


def test_an_unknown_name_is_answered_in_vllms_words(registry: AdapterRegistry) -> None:
    with pytest.raises(AdapterNotFoundError, match=r"^The model `n` does not exist\. Ask") as error:
        registry.acquire("n")
    publish(registry, "m", A)
    with pytest.raises(AdapterNotFoundError, match=r"does not exist\. There is `m`\. Ask for"):
        registry.acquire("n")
    assert error.value.param == "model"
    assert registry.get("n") is None


def test_a_taken_name_is_refused_in_vllms_words(registry: AdapterRegistry) -> None:
    registry.check_name_free("n", load_inplace=False)
    before = publish(registry, "n", A)
    text = (
        "The lora adapter 'n' has already been loaded. If you want to load the adapter in place, "
        "set 'load_inplace' to True."
    )
    with pytest.raises(AdapterExistsError) as early:
        registry.check_name_free("n", load_inplace=False)
    with pytest.raises(AdapterExistsError) as late:
        registry.publish("n", B, load_inplace=False)
    assert str(early.value) == str(late.value) == text
    assert registry.get("n") == before
    registry.check_name_free("n", load_inplace=True)


def test_a_running_request_keeps_its_version_across_load_inplace(registry: AdapterRegistry) -> None:
    publish(registry, "n", A)
    old = registry.acquire("n")
    new = publish(registry, "n", B)
    assert registry.acquire("n") == new != old
    assert info(registry, old).num_leases == 1
    assert registry.get(old.name) != old


def test_a_superseded_version_is_forgotten_with_its_last_lease(registry: AdapterRegistry) -> None:
    publish(registry, "n", A)
    old = registry.acquire("n")
    assert registry.acquire("n") == old
    publish(registry, "n", B)
    registry.release(old)
    assert info(registry, old).num_leases == 1
    registry.release(old)
    registry.check_invariants()
    assert registry.use_of(A.digest) is None


def test_a_superseded_version_without_leases_is_forgotten_at_once(
    registry: AdapterRegistry,
) -> None:
    publish(registry, "n", A)
    publish(registry, "n", B)
    assert registry.use_of(A.digest) is None


def test_paths_are_those_of_versions_that_a_name_or_a_request_has(
    registry: AdapterRegistry,
) -> None:
    old, new = replace(A, path="/old"), replace(B, path="/new")
    publish(registry, "n", old)
    leased = registry.acquire("n")
    publish(registry, "n", new)
    assert set(registry.paths) == {"/old", "/new"}
    registry.release(leased)
    assert registry.paths == ("/new",)
    registry.unload("n")
    assert registry.paths == ()


def test_equal_bytes_in_place_are_the_same_version(registry: AdapterRegistry) -> None:
    first = publish(registry, "n", A)
    registry.acquire("n")
    again = publish(registry, "n", checkpoint_of("A", path="/adapters/two"))
    version = info(registry, again)
    assert again == first
    assert (version.path, version.num_leases, version.created) == ("/adapters/two", 1, 0)


def test_going_back_finds_the_version_that_is_still_leased(registry: AdapterRegistry) -> None:
    publish(registry, "n", A)
    first = registry.acquire("n")
    publish(registry, "n", B)
    assert publish(registry, "n", A) == first
    assert info(registry, first).num_leases == 1
    assert registry.get(first.name) == first


def test_unloading_takes_the_name_at_once_and_leaves_the_lease(registry: AdapterRegistry) -> None:
    ref = publish(registry, "n", A)
    registry.acquire("n")
    assert registry.unload("n") == ref
    with pytest.raises(AdapterNotFoundError, match="The model `n` does not exist"):
        registry.acquire("n")
    assert registry.get(ref.name) != ref
    registry.release(ref)
    assert registry.use_of(A.digest) is None


def test_a_name_that_was_unloaded_is_free(registry: AdapterRegistry) -> None:
    publish(registry, "n", A)
    registry.unload("n")
    assert registry.publish("n", B, load_inplace=False) == AdapterRef("n", B.digest, 0)


@pytest.mark.parametrize("operation", ["unload", "invalidate"])
def test_operations_on_an_unknown_name_are_answered_in_vllms_words(
    registry: AdapterRegistry, operation: str
) -> None:
    with pytest.raises(
        AdapterNotFoundError, match=r"^The lora adapter 'n' cannot be found\. /v1/models"
    ):
        getattr(registry, operation)("n")


def test_invalidation_gives_equal_bytes_another_generation(registry: AdapterRegistry) -> None:
    publish(registry, "n", A, pinned=True)
    leased = registry.acquire("n")
    old, new = registry.invalidate("n")
    assert (old, new) == (leased, AdapterRef("n", A.digest, 1))
    assert registry.get("n") == new
    assert (info(registry, new).pinned, info(registry, old).pinned) == (True, False)
    assert info(registry, old).num_leases == 1


def test_generations_survive_reloads_and_never_go_down(registry: AdapterRegistry) -> None:
    publish(registry, "n", A)
    registry.invalidate("n")
    registry.invalidate("n")
    assert publish(registry, "n", B).generation == 2
    registry.unload("n")
    assert publish(registry, "n", A) == AdapterRef("n", A.digest, 2)
    assert publish(registry, "other", A).generation == 0


def test_the_last_load_decides_the_pin(registry: AdapterRegistry) -> None:
    ref = publish(registry, "n", A, pinned=True)
    assert info(registry, ref).pinned
    assert registry.use_of(A.digest) == DigestUse(num_versions=1, num_pinned=1)
    publish(registry, "n", A, pinned=False)
    assert registry.use_of(A.digest) == DigestUse(num_versions=1)


def test_names_may_share_bytes(registry: AdapterRegistry) -> None:
    one, two = publish(registry, "one", A), publish(registry, "two", A)
    assert one != two
    registry.acquire("one")
    registry.unload("one")
    assert registry.use_of(A.digest) == DigestUse(
        num_versions=2, num_leases=1, num_superseded_leases=1
    )


def test_releasing_more_often_than_acquiring_is_a_bug(registry: AdapterRegistry) -> None:
    ref = AdapterRegistry().publish("n", A, load_inplace=False)
    other = AdapterRegistry()
    other.publish("n", A, load_inplace=False)
    with pytest.raises(AssertionError, match="released more often than acquired"):
        other.release(ref)


def test_info_is_what_the_api_shows(registry: AdapterRegistry) -> None:
    ref = publish(registry, "n", A, pinned=True)
    registry.acquire("n")
    info = registry.info(ref, is_resident=True)
    assert (info.name, info.path, info.digest) == ("n", "/adapters/one", A.digest.hex())
    assert (info.generation, info.rank, info.num_bytes) == (0, 8, 100)
    assert (info.residency, info.pinned, info.num_leases, info.created) == ("resident", True, 1, 0)
    assert registry.info(ref, is_resident=False).residency == "evicted"


def test_a_name_keeps_its_place_in_the_list_across_load_inplace(registry: AdapterRegistry) -> None:
    for name in ("a", "b", "c"):
        publish(registry, name, A)
    publish(registry, "a", B)
    assert [ref.name for ref in registry.current_refs] == ["a", "b", "c"]


def test_the_registry_holds_no_tensors(registry: AdapterRegistry) -> None:
    buffer = bytearray(128)
    publish(registry, "n", whole_checkpoint(memoryview(buffer)))
    buffer.clear()  # fails while a view of it is alive


def test_names_that_fail_leave_nothing_behind(registry: AdapterRegistry) -> None:
    for number in range(100):
        with pytest.raises(AdapterNotFoundError):
            registry.acquire(f"n{number}")
        with pytest.raises(AdapterNotFoundError):
            registry.unload(f"n{number}")
        publish(registry, "n", checkpoint_of(str(number)))
    publish(registry, "n", A)
    registry.unload("n")
    assert list(registry.current_refs) == []
    assert not registry._versions
    assert not registry._uses


def seconds_for_a_thousand_rounds(num_adapters: int) -> float:
    registry = AdapterRegistry()
    for number in range(num_adapters):
        registry.publish(f"n{number}", A, load_inplace=False)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        for number in range(1000):
            ref = registry.acquire("n0")
            registry.publish("n0", A if number % 2 else B, load_inplace=True)
            registry.release(ref)
        best = min(best, time.perf_counter() - began)
    return best


def test_an_operation_takes_no_longer_among_ten_thousand_adapters() -> None:
    assert seconds_for_a_thousand_rounds(10_000) < 10 * seconds_for_a_thousand_rounds(1) + 0.01


def test_a_load_that_is_refused_raises_no_generation_and_none_is_lowered(
    registry: AdapterRegistry,
) -> None:
    registry.publish("a", checkpoint_of("one"), load_inplace=False)
    with pytest.raises(AdapterExistsError):
        registry.publish("a", checkpoint_of("two"), load_inplace=False, generation=5)
    assert registry.invalidate("a")[1].generation == 1
    registry.raise_generation("a", 7)
    assert registry.invalidate("a")[1].generation == 7
