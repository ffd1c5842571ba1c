"""`lora-serve simulate`: how many replicas, which policy and how many adapters a workload needs."""

from __future__ import annotations

import argparse
from pathlib import Path

from lora_serve.cli.bench import add_goodput_argument, add_workload_arguments

POLICIES = ("affinity", "least-loaded", "round-robin")
FIT_SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Play a workload on a fleet that is not there: the real scheduler, KV cache, adapters and "
        "router of each replica, in virtual time, with steps as long as a cost file says. "
        "`simulate fit` measures a machine and writes such a file."
    )
    _add_fleet(parser)
    add_workload_arguments(parser)
    _add_pace(parser)
    _add_engine(parser)
    _add_results(parser)
    parser.set_defaults(run=_run, parser=parser)
    actions = parser.add_subparsers(metavar="fit")
    _add_fit(actions.add_parser("fit", help="measure a model on this machine; write a cost file"))


def _run(args: argparse.Namespace) -> int:
    from lora_serve.cli.simulate_run import run_simulate  # slow to import; not for --help

    return run_simulate(args)


def _run_fit(args: argparse.Namespace) -> int:
    from lora_serve.cli.simulate_fit import run_fit

    return run_fit(args)


def _add_fleet(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("fleet")
    group.add_argument("--cost", type=Path, metavar="FILE",
                       help="What steps, requests and adapters cost, as `simulate fit` writes it."
                       )  # fmt: skip
    group.add_argument("--replicas", default="1", metavar="N",
                       help="How many: 4, or several to compare, as 1,2,4 or 1-4. (default: 1)"
                       )  # fmt: skip
    group.add_argument("--policy", nargs="+", choices=POLICIES, default=["affinity"],
                       metavar="POLICY", help=f"How requests are routed: {', '.join(POLICIES)}. "
                       "(default: affinity)")  # fmt: skip
    group.add_argument("--adapters-per-replica", metavar="N",
                       help="Adapters that a replica keeps in memory (its --max-cpu-loras), or "
                       "several numbers to compare. (default: the cost file's)")  # fmt: skip
    add_goodput_argument(group)
    group.add_argument("--roll-out", nargs="+", default=[], metavar="NAME@SECONDS",
                       help="Replace an adapter at this time, on all replicas as the catalog "
                       "does.")  # fmt: skip
    group.add_argument("--find-replicas", action="store_true",
                       help="Find the fewest replicas with which --attainment of the requests "
                       "are within --goodput.")  # fmt: skip
    group.add_argument("--attainment", type=float, default=0.99, metavar="SHARE",
                       help="Share of the requests to be within the limits. (default: 0.99)"
                       )  # fmt: skip
    group.add_argument("--max-replicas", type=int, default=1024, metavar="N",
                       help="Where --find-replicas gives up. (default: 1024)")  # fmt: skip


def _add_pace(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pace")
    group.add_argument("--num-adapters", type=int, default=0, metavar="N",
                       help="Spread the requests over adapter-0 to adapter-(N-1), instead of "
                       "naming --adapters.")  # fmt: skip
    group.add_argument("--request-rate", type=float, metavar="X",
                       help="Requests a second to the whole fleet, as a Poisson process; a closed "
                       "loop if left out.")  # fmt: skip
    group.add_argument("--max-concurrency", type=int, metavar="N",
                       help="Most requests running at once in the whole fleet. (default: 8 a "
                       "replica in a closed loop)")  # fmt: skip


def _add_engine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine, as the flags of `lora-serve serve`; the cost file's "
                                      "if left out")  # fmt: skip
    for flag in ("--max-loras", "--max-num-seqs", "--max-num-batched-tokens", "--max-model-len",
                 "--num-gpu-blocks-override"):  # fmt: skip
        group.add_argument(flag, type=int, metavar="N")
    group.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)


def _add_results(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument("--json", type=Path, metavar="FILE", help="Write all figures.")


def _add_fit(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Measure steps of a model on this machine, then a server under small loads, and write what "
        "they cost. Nothing else should run meanwhile."
    )
    parser.add_argument("model", nargs="?", metavar="MODEL",
                        help="What would be served; the tiny demo model if left out.")  # fmt: skip
    parser.add_argument("--output", type=Path, required=True, metavar="FILE",
                        help="The cost file to write.")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=FIT_SECONDS, metavar="X",
                        help="How long to time steps; loads on the server come after. "
                        "(default: %(default)g)")  # fmt: skip
    parser.add_argument("--serve-args", nargs=argparse.REMAINDER, default=[], metavar="ARG",
                        help="The rest of the line goes to `lora-serve serve`.")  # fmt: skip
    parser.set_defaults(run=_run_fit, parser=parser)
