"""Random operations against plain books, and known bugs put back to see that the books notice."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lora_serve.adapter_checkpoint import AdapterCheckpoint
from lora_serve.adapters.loader import Loader
from lora_serve.adapters.manager import AdapterManager
from lora_serve.adapters.registry import AdapterRegistry
from lora_serve.adapters.residency import AdapterResidency, Claim
from lora_serve.config import LoRAConfig
from lora_serve.identity import AdapterRef
from tests.fakes.adapter_world import World

Make = Callable[[LoRAConfig, Loader], AdapterManager]

NUM_TRACES = 60
NUM_OPERATIONS = 120


def is_noticed(make: Make) -> bool:
    for seed in range(NUM_TRACES):
        max_cpu_loras = 1 + seed % 4
        try:
            World(make, max_cpu_loras, seed).run(NUM_OPERATIONS)
        except (AssertionError, KeyError):
            return True
    return False


@pytest.mark.parametrize("max_cpu_loras", [1, 2, 3, 4])
def test_the_manager_agrees_with_plain_books(max_cpu_loras: int) -> None:
    for seed in range(NUM_TRACES):
        World(AdapterManager, max_cpu_loras, seed).run(NUM_OPERATIONS)


# ── known bugs ──────────────────────────────────────────────────────────────────────────────


class EvictsSupersededVersions(AdapterManager):
    def _claim(self, digest: bytes) -> Claim:
        use = self._registry.use_of(digest)
        if use is not None and use.num_superseded_leases and not use.num_pinned:
            return Claim.LEASED
        return super()._claim(digest)


class EvictsPinnedAdapters(AdapterManager):
    def _claim(self, digest: bytes) -> Claim:
        use = self._registry.use_of(digest)
        if use is not None and use.num_pinned and not use.num_superseded_leases:
            return Claim.LEASED if use.num_leases else Claim.IDLE
        return super()._claim(digest)


class ForgetsToSettleReleases(AdapterManager):
    def release(self, ref: AdapterRef) -> None:
        self._registry.release(ref)


class ForgetsWhatWasReplaced(AdapterManager):
    def publish(
        self, name: str, checkpoint: AdapterCheckpoint, *, load_inplace: bool, pinned: bool = False
    ) -> AdapterRef:
        ref = self._registry.publish(name, checkpoint, load_inplace=load_inplace, pinned=pinned)
        self._add_prepared(ref.digest)
        return ref


class ForgetsPreparedCopies(AdapterManager):
    def publish(
        self, name: str, checkpoint: AdapterCheckpoint, *, load_inplace: bool, pinned: bool = False
    ) -> AdapterRef:
        self._registry.check_name_free(name, load_inplace)
        return super().publish(name, checkpoint, load_inplace=load_inplace, pinned=pinned)


class EvictsRunningAdapters(AdapterResidency):
    def on_running(self, digest: bytes) -> None:
        """Keep no count."""

    def on_idle(self, digest: bytes) -> None:
        """Keep no count."""


class EvictsWhatWasJustReadBack(AdapterResidency):
    def add(self, digest: bytes, claim: Claim, *, is_awaited: bool = False) -> None:
        super().add(digest, claim)


class NeverShrinks(AdapterResidency):
    def _shrink(self) -> None:
        """Let it grow."""


class TellsUnwantedCopiesNever(AdapterResidency):
    def take_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        drop, add = super().take_changes()
        self._drop.clear()
        return drop, add


class DropsWhatNeverArrived(AdapterResidency):
    def _remove(self, digest: bytes) -> None:
        is_pending = digest not in self._active
        super()._remove(digest)
        if is_pending:
            self._drop.append(digest)


class DropsSharedWeightsWithOneName(AdapterManager):
    def unload(self, name: str) -> None:
        ref = self._registry.unload(name)
        self._residency.settle(ref.digest, Claim.NONE)


class ForgetsGenerations(AdapterRegistry):
    def unload(self, name: str) -> AdapterRef:
        self._generations.pop(name, None)
        return super().unload(name)


class ForgetsLeasedVersions(AdapterRegistry):
    def _forget_if_unused(self, ref: AdapterRef) -> None:
        self._versions[ref].num_leases = 0
        super()._forget_if_unused(ref)


class LooksUpWithoutLeasing(AdapterRegistry):
    def acquire(self, name: str) -> AdapterRef:
        ref = super().acquire(name)
        self._add_leases(ref, -1)
        return ref

    def release(self, ref: AdapterRef) -> None:
        """Nothing was leased."""


def with_residency(residency: type[AdapterResidency]) -> Make:
    def make(config: LoRAConfig, loader: Loader) -> AdapterManager:
        manager = AdapterManager(config, loader)
        manager._residency = residency(config.cpu_lora_limit)
        return manager

    return make


def with_registry(registry: type[AdapterRegistry]) -> Make:
    def make(config: LoRAConfig, loader: Loader) -> AdapterManager:
        manager = AdapterManager(config, loader)
        manager._registry = registry()
        return manager

    return make


MUTANTS: dict[str, Make] = {
    mutant.__name__: mutant
    for mutant in (
        EvictsSupersededVersions,
        EvictsPinnedAdapters,
        ForgetsToSettleReleases,
        ForgetsWhatWasReplaced,
        ForgetsPreparedCopies,
        DropsSharedWeightsWithOneName,
    )
}
MUTANTS |= {
    mutant.__name__: with_residency(mutant)
    for mutant in (
        EvictsRunningAdapters,
        EvictsWhatWasJustReadBack,
        NeverShrinks,
        TellsUnwantedCopiesNever,
        DropsWhatNeverArrived,
    )
}
MUTANTS |= {
    mutant.__name__: with_registry(mutant)
    for mutant in (ForgetsGenerations, ForgetsLeasedVersions, LooksUpWithoutLeasing)
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_books_notice_a_known_bug(mutant: str) -> None:
    assert is_noticed(MUTANTS[mutant])
