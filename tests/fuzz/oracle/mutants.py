"""How many of the oracle's traces catch each bug that is put back: `python -m` prints the table.

The bugs are those of tests/test_*_traces.py, which hold that each is caught at all. Some are
classes in the place of the engine's; others replace a function while a trace runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

from lora_serve.fuzz.oracle import executor
from lora_serve.fuzz.oracle.campaign import NUM_OPERATIONS, NUM_TIERED_OPERATIONS
from lora_serve.fuzz.oracle.engine import OracleEngine
from lora_serve.fuzz.oracle.tiered_traces import TieredTrace
from lora_serve.fuzz.oracle.traces import OracleTrace
from lora_serve.kv.event_recorder import KVEventRecorder
from lora_serve.scheduler import chunk, drafting, progress
from lora_serve.scheduler.scheduler import Scheduler
from lora_serve.speculation.draft_model import DraftModelDrafter, DraftModelRequest
from lora_serve.structured_outputs import MaskedDrafts
from tests import test_draft_model_traces as draft_models
from tests import test_drafted_traces as drafted
from tests import test_event_traces as events
from tests import test_fair_traces as fair
from tests import test_grammar_traces as grammars
from tests import test_overlapped_traces as overlapped
from tests import test_pause_traces as pauses
from tests import test_pooling_traces as pooling
from tests import test_rank_traces as ranks
from tests import test_tiered_traces as tiered
from tests import test_traces as plain
from tests import test_window_traces as windows
from tests.fakes import mutant_hashers as hashers
from tests.fakes import mutant_schedulers as schedulers
from tests.fakes.oracle_ranks import OracleRank, RankedOracles

# By which a broken engine ends.
FAULTS = (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError)
IsWrong = Callable[[int], bool]  # whether the answers of a seed's trace are wrong


@dataclass(frozen=True)
class Mutant:
    """bug: what is put back. patch: makes what holds while a trace runs, if anything does."""

    bug: str
    is_wrong: IsWrong
    patch: Callable[[], AbstractContextManager[Any]] = nullcontext


def of_trace(**settings: Any) -> IsWrong:
    return lambda seed: bool(OracleTrace(seed, **settings).run(NUM_OPERATIONS).wrong)


def of_tiers(make: type[TieredTrace] = TieredTrace, **settings: Any) -> IsWrong:
    return lambda seed: bool(make(seed, **settings).run(NUM_TIERED_OPERATIONS).wrong)


def of_engine(change: Callable[[OracleEngine], None], **settings: Any) -> IsWrong:
    """Run traces whose engines are changed when they have been made."""

    class ChangedTrace(OracleTrace):
        def _new_engine(self) -> OracleEngine:
            engine = super()._new_engine()
            change(engine)
            return engine

    return lambda seed: bool(ChangedTrace(seed, **settings).run(NUM_OPERATIONS).wrong)


def of_ranks(kind: type[OracleRank]) -> IsWrong:
    def is_wrong(seed: int) -> bool:
        with closing(RankedOracles(seed, (2, 4), kind)) as oracles:
            trace = OracleTrace(seed, executor_class=oracles)
            try:
                return oracles.is_wrong(partial(trace.run, NUM_OPERATIONS))
            except FAULTS as error:  # which says nothing of answers
                raise SystemExit(f"{kind.__name__} stumbles in trace {seed}") from error

    return is_wrong


def replaced(owner: Any, name: str, mutant: Any) -> Callable[[], AbstractContextManager[Any]]:
    return lambda: mock.patch.object(owner, name, mutant)


def plain_mutants() -> Iterator[Mutant]:
    for key, bug in (
        (hashers.KeyHoldsOnlyTheName, "a block's key holds only the adapter's name"),
        (hashers.KeyIgnoresTheAdapter, "a block's key ignores the adapter"),
        (hashers.KeyIgnoresEmbeds, "a block's key ignores embeddings"),
        (hashers.KeyIgnoresTheParent, "a block's key ignores the blocks before it"),
    ):
        yield Mutant(bug, of_trace(hasher_class=key))
    for kv, bug in (
        (plain.OffersWhenAdmitted, "blocks can be found when a request is admitted"),
        (plain.ForgetsToUncache, "an evicted block keeps its hash"),
    ):
        yield Mutant(bug, of_trace(kv_class=kv))
    for loader, bug in (
        (plain.GivesNoReadUp, "an adapter's read is not given up when its name is loaded again"),
        (plain.PublishesLateReads, "an adapter's read that comes too late is published"),
        (plain.ReadsCallsOfOneNameAtOnce, "calls of one name are read at once"),
    ):
        yield Mutant(bug, of_trace(loader_class=loader))
    first_row = "an embedding is of another row"
    yield Mutant(first_row, of_trace(executor_class=pooling.PoolsTheFirstRow))


def overlapped_mutants() -> Iterator[Mutant]:
    of_overlapped = partial(of_trace, async_scheduling=True)
    for one, bug in (
        (
            overlapped.TakesAnotherRowsToken,
            "a step takes the token of another row of the one before",
        ),
        (overlapped.DropsAdaptersWhenSubmitted, "a step drops adapters that the one before uses"),
    ):
        yield Mutant(bug, of_overlapped(executor_class=one))
    bug = "blocks are committed that the step in flight still writes"
    yield Mutant(bug, of_overlapped(kv_class=overlapped.CommitsWhatIsInFlight))
    for steps, bug in (
        (overlapped.ForgetsPlaces, "all pending tokens are looked for in the first row"),
        (overlapped.ReportsDiscardedRows, "rows behind the end of an answer are told"),
    ):

        def change(engine: OracleEngine, steps: Any = steps) -> None:
            engine.core.scheduler._in_flight = steps()

        yield Mutant(bug, of_engine(change, async_scheduling=True))


def grammar_mutants() -> Iterator[Mutant]:
    for service, bug in (
        (grammars.GivesTheMaskOfAnotherRequest, "an answer gets another's mask"),
        (grammars.GivesTheMaskOfTheStepBefore, "an answer gets the mask of the step before"),
        (grammars.LetsEveryAnswerEnd, "a mask lets every answer end"),
        (grammars.ForcesWhatTheMaskLeavesOpen, "one of several tokens is taken for a forced one"),
        (grammars.PermitsWhateverIsGuessed, "a guess goes beyond what the grammar permits"),
        (grammars.GoesOnByTheGuess, "a grammar takes a guess for what the answer says"),
    ):
        yield Mutant(bug, of_trace(grammars_class=service))
    behind = MaskedDrafts.bitmask_behind

    def of_the_row_before(drafts: MaskedDrafts, count: int) -> bytes:
        return behind(drafts, max(1, count - 1))

    bug = "rows of drafts get the mask of the row before"
    yield Mutant(bug, of_trace(), replaced(MaskedDrafts, "bitmask_behind", of_the_row_before))
    bug = "rows of guesses have no mask"
    yield Mutant(bug, of_trace(), replaced(chunk, "_bitmask_behind", grammars.unmasked_guesses))
    bug = "a guess goes on behind the end of reasoning"
    yield Mutant(bug, of_trace(), replaced(drafting, "_end_before_grammar", lambda request: None))


def window_mutants() -> Iterator[Mutant]:
    settings: dict[str, Any] = {"groups": windows.MIXED}
    for kv, bug in (
        (windows.FreesTooEarly, "blocks are freed that a window still sees"),
        (windows.FreesWhatIsInFlight, "blocks are freed that the window of a step in flight sees"),
        (
            windows.HitsWithoutTheWindow,
            "a hit is believed of layers whose window was not looked up",
        ),
        (windows.CommitsWhatItFreed, "blocks are committed that a window has left"),
    ):
        yield Mutant(bug, of_trace(kv_class=kv, async_scheduling=True, **settings))
    bug = "a record's blocks stand in other groups' places"
    yield Mutant(bug, of_tiers(connector_class=windows.MixesGroupsUp, **settings))
    bug = "blocks are stored that a window has left"
    connector = windows.SavesWhatItDoesNotHold
    yield Mutant(bug, of_tiers(windows.SavesAfterHits, connector_class=connector, **settings))


def event_mutants() -> Iterator[Mutant]:
    for recorder, bug in (
        (events.TakesNothingBack, "events do not take back a replaced version's blocks"),
        (events.TellsNothingAgain, "events tell nothing of a version that came back"),
        (events.TellsOfNoEviction, "events tell of no eviction"),
        (events.TellsOfEveryVersion, "events tell of blocks of a replaced version"),
    ):
        yield Mutant(bug, of_trace(recorder_class=recorder))
    settings = {"kv_class": events.TellsBeforeCommit, "recorder_class": KVEventRecorder}
    yield Mutant("events tell of blocks before the commit", of_trace(**settings))


def pause_mutants() -> Iterator[Mutant]:
    for pause, bug in (
        (pauses.LosesHeldRequests, "requests are lost that come in a pause"),
        (pauses.GoesOnWhilePaused, "steps go on in a pause"),
    ):

        def with_pause(engine: OracleEngine, pause: Any = pause) -> None:
            engine.core.scheduler._pause = pause()

        yield Mutant(bug, of_engine(with_pause))
    for scheduler, bug in (
        (pauses.FreesKeptBlocks, "a pause frees blocks that it should keep"),
        (pauses.IsAtRestAtOnce, "a pause is confirmed before requests have ended"),
    ):

        def with_scheduler(engine: OracleEngine, scheduler: Any = scheduler) -> None:
            engine.core.scheduler.__class__ = scheduler

        yield Mutant(bug, of_engine(with_scheduler))


def fair_mutants() -> Iterator[Mutant]:
    for scheduler, bug in (
        (schedulers.LeavesThePlaceToAll, "a request that gave way is let in again at once"),
        (schedulers.AsksForNoCounts, "a request gives way to a share that has got more"),
        (schedulers.LooksForNothingBefore, "a request gives way to one that cannot run yet"),
        (schedulers.KeepsHavingGivenWay, "a request that gave way once never resumes first again"),
    ):

        def is_wrong(seed: int, scheduler: type[Scheduler] = scheduler) -> bool:
            return bool(fair.fair_trace(seed, scheduler).run(NUM_OPERATIONS).wrong)

        yield Mutant(bug, is_wrong)


def drafted_mutants() -> Iterator[Mutant]:
    def is_wrong(seed: int) -> bool:
        return bool(drafted.run_trace(seed)[0].wrong)

    def of_suffixes(seed: int) -> bool:
        return bool(drafted.suffix_trace(seed).run(NUM_OPERATIONS).wrong)

    for owner, name, mutant, bug in (
        (executor, "accepted", drafted.accepts_all, "every draft is accepted"),
        (executor, "accepted", drafted.goes_on_behind_the_first_that_differs,
         "drafts behind a wrong one are accepted"),
        (progress, "take_in_drafts", drafted.offers_what_rejected_drafts_wrote,
         "a rejected draft's KV is offered"),
        (progress, "take_in_drafts", drafted.goes_on_behind_the_end,
         "an answer goes on behind its end"),
        (chunk, "_sample_input", drafted.forgets_the_drafts_before,
         "rows are sampled as if no draft were before them"),
    ):  # fmt: skip
        yield Mutant(bug, is_wrong, replaced(owner, name, mutant))
    for origin, bug in (
        (drafted.of_any_tenant, "drafts are of another tenant's answers"),
        (drafted.of_any_salt, "drafts are of another salt's answers"),
        (drafted.of_any_version, "drafts are of another version's answers"),
    ):
        yield Mutant(bug, of_suffixes, replaced(drafting, "_origin", origin))


def draft_model_mutants() -> Iterator[Mutant]:
    def is_wrong(seed: int) -> bool:
        return bool(draft_models.model_trace(seed).run(NUM_OPERATIONS).wrong)

    def first_block(drafter: DraftModelDrafter) -> int:
        return 0

    for owner, name, mutant, bug in (
        (DraftModelRequest, "draft", draft_models.offers_what_a_rejection_overtook,
         "a draft model's guesses are kept that a rejection overtook"),
        (DraftModelRequest, "num_lacking", draft_models.keeps_the_kv_of_rejected_guesses,
         "a draft model goes on from the KV of rejected guesses"),
        (DraftModelDrafter, "_take", first_block, "requests of a draft model have the same block"),
    ):  # fmt: skip
        yield Mutant(bug, is_wrong, replaced(owner, name, mutant))


def rank_mutants() -> Iterator[Mutant]:
    for rank, bug in (
        (ranks.IsAStepBehind, "a rank is a step behind"),
        (ranks.HasNoAdapters, "an adapter is on one rank only"),
        (ranks.GathersInAnotherOrder, "a rank gathers in another order"),
        (ranks.WritesTheKVOfOtherHeads, "a rank writes the KV of another's heads"),
    ):
        yield Mutant(bug, of_ranks(rank))


def tiered_mutants() -> Iterator[Mutant]:
    for one, bug in (
        (tiered.LoadsAfterCompute, "KV from tiers is loaded after it was needed"),
        (tiered.LoadsNothing, "KV from tiers is not loaded"),
    ):
        yield Mutant(bug, of_tiers(executor_class=one))
    for connector, bug in (
        (tiered.IgnoresWhereTheHitEnds,
         "a load begins where the hit ends by now, whatever was fetched"),
        (tiered.IgnoresWhoseChainItIs, "a load takes another chain's blocks"),
    ):  # fmt: skip
        yield Mutant(bug, of_tiers(connector_class=connector))


ALL = (
    *(plain_mutants, overlapped_mutants, grammar_mutants, window_mutants, event_mutants),
    *(
        pause_mutants,
        fair_mutants,
        drafted_mutants,
        draft_model_mutants,
        rank_mutants,
        tiered_mutants,
    ),
)


def is_caught(mutant: Mutant, seed: int) -> bool:
    """Whether it gives a wrong answer, breaks an invariant, or ends the engine."""
    with mutant.patch():
        try:
            return mutant.is_wrong(seed)
        except FAULTS:
            return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-traces", type=int, default=100, help="of each")
    count = parser.parse_args().num_traces
    print("| bug that is put back | traces | caught by |\n|---|--:|--:|")
    for mutants in ALL:
        for mutant in mutants():
            caught = sum(is_caught(mutant, seed) for seed in range(count))
            print(f"| {mutant.bug} | {count} | {caught} |", flush=True)


if __name__ == "__main__":
    main()
