"""How many of the oracle's traces catch each bug that is put back: `python -m` prints the table.

The bugs are those of tests/test_traces.py, test_tiered_traces.py and test_overlapped_traces.py,
which hold that each is caught at all.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from lora_serve.fuzz.oracle.campaign import NUM_OPERATIONS, NUM_TIERED_OPERATIONS
from lora_serve.fuzz.oracle.tiered_traces import TieredTrace
from lora_serve.fuzz.oracle.traces import OracleTrace
from tests import test_grammar_traces as grammars
from tests import test_overlapped_traces as overlapped
from tests import test_tiered_traces as tiered
from tests import test_traces as plain

MakeTrace = Callable[[int], OracleTrace]


def plain_mutants() -> dict[str, MakeTrace]:
    keys = (
        plain.KeyHoldsOnlyTheName,
        plain.KeyIgnoresTheAdapter,
        plain.KeyIgnoresEmbeds,
        plain.KeyIgnoresTheParent,
    )
    managers = (plain.OffersWhenAdmitted, plain.ForgetsToUnname)
    traces: dict[str, MakeTrace] = {
        key.__name__: lambda seed, key=key: OracleTrace(seed, hasher_class=key)  # type: ignore[misc]
        for key in keys
    }
    traces |= {
        kv.__name__: lambda seed, kv=kv: OracleTrace(seed, kv_class=kv)  # type: ignore[misc]
        for kv in managers
    }
    loaders = (
        plain.GivesNoReadUp,
        plain.PublishesLateReads,
        plain.ReadsCallsOfOneNameAtOnce,
    )
    return traces | {
        one.__name__: lambda seed, one=one: OracleTrace(seed, loader_class=one)  # type: ignore[misc]
        for one in loaders
    }


def overlapped_mutants() -> dict[str, MakeTrace]:
    executors = (overlapped.TakesAnotherRowsToken, overlapped.DropsAdaptersWhenSubmitted)
    traces: dict[str, MakeTrace] = {
        one.__name__: lambda seed, one=one: OracleTrace(  # type: ignore[misc]
            seed, executor_class=one, async_scheduling=True
        )
        for one in executors
    }
    kv = overlapped.CommitsWhatIsInFlight
    traces[kv.__name__] = lambda seed: OracleTrace(seed, kv_class=kv, async_scheduling=True)
    return traces


def tiered_mutants() -> dict[str, MakeTrace]:
    executors = (tiered.LoadsAfterCompute, tiered.LoadsNothing)
    connectors = (tiered.IgnoresWhereTheHitEnds, tiered.IgnoresWhoseChainItIs)
    traces: dict[str, MakeTrace] = {
        one.__name__: lambda seed, one=one: TieredTrace(seed, executor_class=one)  # type: ignore[misc]
        for one in executors
    }
    return traces | {
        one.__name__: lambda seed, one=one: TieredTrace(seed, connector_class=one)  # type: ignore[misc]
        for one in connectors
    }


def grammar_mutants() -> dict[str, MakeTrace]:
    services = (
        grammars.GivesTheMaskOfAnotherRequest,
        grammars.GivesTheMaskOfTheStepBefore,
        grammars.LetsEveryAnswerEnd,
    )
    return {
        one.__name__: lambda seed, one=one: OracleTrace(seed, grammars_class=one)  # type: ignore[misc]
        for one in services
    }


def is_caught(trace: OracleTrace, num_operations: int) -> bool:
    """Whether it gives a wrong answer, breaks an invariant, or ends the engine."""
    try:
        return bool(trace.run(num_operations).wrong)
    except (AssertionError, LookupError, ValueError):
        return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-traces", type=int, default=100, help="of each")
    count = parser.parse_args().num_traces
    print("| bug that is put back | traces | caught by |\n|---|--:|--:|")
    for mutants, num_operations in (
        (plain_mutants(), NUM_OPERATIONS),
        (overlapped_mutants(), NUM_OPERATIONS),
        (grammar_mutants(), NUM_OPERATIONS),
        (tiered_mutants(), NUM_TIERED_OPERATIONS),
    ):
        for name, make in mutants.items():
            caught = sum(is_caught(make(seed), num_operations) for seed in range(count))
            print(f"| `{name}` | {count} | {caught} |", flush=True)


if __name__ == "__main__":
    main()
