"""Whether all was well, and whether the soak has met what it is for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.common.checks import Check
from benchmarks.soak.fleet.history import Answer, History
from benchmarks.soak.fleet.journal import (
    ANSWERED,
    EVERYWHERE,
    MAX_STORIES,
    OTHER_BITS,
    UNEXPECTED,
    Journal,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """faults: how many of each kind. finals: what all replicas came to say; None if they differ."""

    journal: Journal
    num_names: int
    num_kinds_of_faults: int
    faults: Mapping[str, int]
    finals: Sequence[Answer] | None


def checks(record: Record) -> list[Check]:
    """What must hold; the journal's stories tell of what does not."""
    journal = record.journal
    history = History(journal.changes)
    answers = [*journal.answers, *(record.finals or ())]
    wrong = [fault for fault in map(history.fault_of, answers) if fault is not None]
    returns, disorders = [*history.returns(journal.answers)], [*history.disorders()]
    journal.stories += [*wrong, *returns, *disorders][:MAX_STORIES]
    heard, done = journal.heard, journal.done
    faults = ", ".join(f"{count} {what}" for what, count in sorted(record.faults.items()))
    return [
        Check("no answer by a version that the name did not stand for", not wrong,
              f"{len(wrong)} of {len(answers):,}"),
        Check("no process went back to an earlier version", not returns,
              f"{len(returns)} of {len(journal.answers):,}"),
        Check("serials are in the order of calls", not disorders,
              f"{len(disorders)} of {len(journal.changes):,}"),
        Check("a version's answers are the same bits everywhere", not heard[OTHER_BITS],
              f"{heard[OTHER_BITS]} of {heard[ANSWERED]:,}"),
        Check("no refusal but by what was down", not heard[UNEXPECTED], str(heard[UNEXPECTED])),
        Check("all replicas agree at the end", record.finals is not None,
              f"{record.num_names:,} names"),
        Check("met: changes that were everywhere", done[EVERYWHERE] > record.num_names,
              f"{done[EVERYWHERE]:,} of {sum(done.values()):,}"),
        Check("met: changes of one name at once", history.num_races > 0, str(history.num_races)),
        Check("met: each kind of fault", len(record.faults) == record.num_kinds_of_faults, faults),
    ]  # fmt: skip
